"""The backend that `torch.compile(backend="aotdist")` calls with each graph of Dynamo; compiled backwards.

`aotdist.compile_backward`: PyTorch records backwards as tapes, which Dynamo traces like a program.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from aotdist.artifacts.cache.backend import caching
from aotdist.codegen.backend import Compiler, is_eager, resolve
from aotdist.codegen.contract import Backend
from aotdist.compiled import Compiled
from aotdist.compiling import Compiling
from aotdist.dynamo.graph import DynamoGraph
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.origins import short_tracebacks
from aotdist.settings import Settings, by_name, settings_of
from aotdist.subclasses.protocol import is_real
from aotdist.torch_seam.dynamo import compiling_tapes, dynamo_frame, forget_tapes, skip_our_frames
from aotdist.torch_seam.symbols import hint


class Region(Compiled):
    """A graph of Dynamo as a callable that compiles itself for each new kind of call.

    Dynamo calls the graph whenever its own guards hold. What a compiled program depends on besides (which
    inputs share memory, strides, conditions on symbols) is guarded here, as for every compiled function.

    Attributes:
        name: the frame that Dynamo compiled: `forward [0/0]`.
    """

    def __init__(self, gm: GraphModule, backend: Backend, settings: Settings) -> None:
        graph = DynamoGraph.of(gm)
        self.name = dynamo_frame()
        vars(gm)["__name__"] = self.name
        self._graph = graph
        super().__init__(
            lambda: graph.gm,
            graph.run,
            Compiling(backend, settings, lambda call: graph.open_dims(call.kwargs)),
        )
        _regions[next(_numbers)] = self

    def __call__(self, *inputs: Any) -> Any:
        """Run the artifact that fits, making one if there is none."""
        results = super().__call__(**self._graph.named(inputs))
        if self._graph.left_grad_mode is not None:
            torch.set_grad_enabled(self._graph.left_grad_mode)
        return results

    @short_tracebacks
    def compile_for(self, inputs: Sequence[Any]) -> None:
        """Compile for a call with these inputs, without calling."""
        if all(is_real(value) for value in inputs if isinstance(value, torch.Tensor)):
            # While Dynamo compiles, numbers are symbols.
            self._made((), self._graph.named([hint(value) for value in inputs]))


_numbers = itertools.count()
_regions: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()


def regions() -> list[Region]:
    """The graphs that Dynamo compiled with this backend and still holds, the oldest first."""
    return list(_regions.values())


def backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Settings | Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo.

    Args:
        gm: the graph; parameters and buffers are among its inputs.
        example_inputs: of its first call.
        mode: of `torch.compile`; `reduce-overhead` is `Settings(cuda_graphs=True)`.
        options: of `torch.compile`: fields of `aotdist.Settings`, and `backend`, as for `aotdist.compile`
            (`eager` runs Dynamo's graphs as they are); or an `aotdist.Settings`.

    Raises:
        BadSettings: the mode or an option is unknown, or is another compiler's.
        UnsupportedProgram: the graph cannot be compiled ahead of time.
        RankDivergence: the ranks compiled different sequences of collectives.
    """
    chosen = _checked(mode, _named(options))
    code_backend = chosen.pop("backend", "auto")
    settings = settings_of(chosen or None)
    if is_eager(code_backend):
        return gm.forward
    return compile_graph(gm, example_inputs, resolve(code_backend), settings)


def compile_graph(
    gm: GraphModule, example_inputs: Sequence[Any], code_backend: Backend, settings: Settings
) -> Region:
    """Compile one graph of Dynamo.

    Args:
        example_inputs: of its first call; if they are fake, the first call compiles.
        settings: how to compile; Dynamo decides which sizes are dynamic.
    """
    skip_our_frames()
    settings = replace(settings, dynamic=False)
    region = Region(gm, caching(code_backend, settings), settings)
    region.compile_for(example_inputs)
    return region


def _named(options: Settings | Mapping[str, Any] | None) -> dict[str, Any]:
    match options:
        case None:
            return {}
        case Settings():
            return asdict(options)
        case _:
            return by_name("options", options)


def _checked(mode: str | None, options: dict[str, Any]) -> dict[str, Any]:
    """Settings by name.

    Raises:
        BadSettings: the mode is another compiler's, or `dynamic` is set.
    """
    if options.get("dynamic") not in (None, False, "auto"):  # the last is what Dynamo does by itself
        raise BadSettings(
            "the option `dynamic` cannot be honoured: Dynamo decides which sizes are open",
            fix="call `torch.compile(..., dynamic=True)`",
        )
    match mode:
        case None | "default":
            return options
        case "reduce-overhead":
            return {**options, "cuda_graphs": True}
        case _:
            raise BadSettings(
                f"mode={mode!r} is Inductor's",
                fix='leave it out, or choose "reduce-overhead"; `options` takes the fields of '
                "`aotdist.Settings`",
            )


@dataclass(frozen=True, slots=True)
class _TapeCompiler:
    """Compiles tapes; compilers that are equal share the tapes that PyTorch has cached."""

    backend: str | Compiler | Backend
    settings: Settings
    dynamic: bool | None

    def __call__(self, tape: GraphModule) -> Callable[..., Any]:
        """Compile a tape; Dynamo traces it again, with its hooks."""
        compiled = torch.compile(tape, backend=self._compiled, dynamic=self.dynamic)

        def call(inputs: Any, sizes: Any, scalars: Any, hooks: Sequence[Any], packed: Any) -> Any:
            _refuse_fsdp(hooks)
            return compiled(inputs, sizes, scalars, hooks, packed)

        return call

    def _compiled(self, gm: GraphModule, example_inputs: Any) -> Any:
        return compile_graph(gm, example_inputs, resolve(self.backend), self.settings)


def _refuse_fsdp(hooks: Sequence[Any]) -> None:
    """Raise for hooks of FSDP2, which gather parameters and reduce gradients: a tape loses their order.

    On two ranks gradients would be wrong, whatever compiles the tape (torch 2.13, `backend="eager"`).
    """
    for hook in hooks:
        called = getattr(hook, "_forward_cls", getattr(hook, "func", hook))
        if str(getattr(called, "__module__", "")).startswith("torch.distributed.fsdp"):
            raise UnsupportedProgram(
                "FSDP2 calls hooks of its own in this backward",
                stage="capture",
                fix="run it outside of `compile_backward`, or use `aotdist.compile` for the model",
            )


_last: _TapeCompiler | None = None
"""The compiler of the tapes in PyTorch's cache, which does not tell compilers apart."""


@contextmanager
def compile_backward(
    *,
    backend: str | Compiler | Backend = "auto",
    settings: Settings | Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
) -> Generator[None]:
    """Compile the backwards that run inside the context.

    The tape that autograd is about to run is recorded first: formulas of operators, hooks of tensors and
    parameters, accumulation into gradients. It is compiled as a graph of Dynamo, and kept for tapes of the
    same nodes. Backwards of `autograd.Function`s are part of it if Dynamo can trace them; those of compiled
    programs are called. The context holds for all threads, one backward at a time.

    Args:
        backend: as for `aotdist.compile`.
        settings: likewise.
        dynamic: of `torch.compile`, for the sizes on the tape; with False there is a tape for each size.

    Raises:
        BadSettings: the backend, a setting or `dynamic` is unknown.
        UnsupportedProgram: a backward calls hooks of FSDP2. Nothing has been changed then.
    """
    global _last
    given = settings_of(settings)
    if dynamic not in (None, True, False):
        raise BadSettings(f"`dynamic` is {dynamic!r}", fix="give True, False or None")
    dynamic = dynamic if dynamic is not None else (True if given.dynamic is True else None)
    if is_eager(backend):
        yield
        return
    compiler = _TapeCompiler(backend, given, dynamic)
    caching(resolve(backend), given).check()
    if compiler != _last:
        forget_tapes()
        _last = compiler
    with compiling_tapes(compiler, dynamic=dynamic is not False):
        yield
