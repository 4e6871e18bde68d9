"""`aotdist.compile_backward`: PyTorch records backwards as tapes, which Dynamo traces like a program."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from aotdist.artifacts.cache.backend import caching
from aotdist.codegen.backend import Compiler, is_eager, resolve
from aotdist.codegen.contract import Backend
from aotdist.dynamo.backend import compile_graph
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.settings import Settings, settings_of
from aotdist.torch_seam.dynamo import compiling_tapes, forget_tapes


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
