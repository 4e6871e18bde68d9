"""Dynamo: its graphs, compiled autograd, and PyTorch's structured trace."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._higher_order_ops.utils import _hop_compile_tls
from torch.fx.experimental._backward_state import BackwardState

from aotdist.torch_seam.inductor import TracingContext
from aotdist.torch_seam.patches import Patch, Place


def dynamo_source(placeholder: torch.fx.Node) -> str:
    """The source from which Dynamo reads an input of a graph (`L['x']`), or an empty string."""
    argument = placeholder.meta.get("grapharg")
    source = None if argument is None else argument.source
    return "" if source is None else source.name


def is_of_dynamo(target: Any) -> bool:
    """Whether a callable came from `torch.compile`, or a module has `compile()` called on it."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    call = getattr(target, "_compiled_call_impl", None) or target
    return frames is not None and (
        isinstance(call, frames.OptimizedModule) or hasattr(call, "_torchdynamo_orig_callable")
    )


def is_wrapped_number(placeholder: torch.fx.Node) -> bool:
    """Whether an input of a Dynamo graph is a Python number that is passed as a tensor."""
    argument = placeholder.meta.get("grapharg")
    return argument is not None and argument.pass_arg_as_tensor


def is_of_hooks(example: Any) -> bool:
    """Whether an input of a Dynamo graph carries the hooks that a call registers."""
    return isinstance(example, BackwardState)


def grad_mode_left_by(gm: torch.fx.GraphModule) -> bool | None:
    """The grad mode that a Dynamo graph leaves behind; None if it never switches it."""
    nodes = gm.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    return nodes[-1].args[0] if nodes else None


def is_data_assignment(node: torch.fx.Node) -> bool:
    """Whether a node of a Dynamo graph is `x.data = y`.

    An operator for it alone from torch 2.14 on, before that a `set_` that the version counter does not count.
    """
    if node.target is torch.Tensor.set_:
        return any(lowers_version(user.target) for user in node.users)
    return node.target is getattr(torch.ops.aten, "shallow_copy_data_", None)


def lowers_version(target: Any) -> bool:
    """Whether a function in a Dynamo graph lowers the version counter by one, after a `set_`."""
    return getattr(target, "__name__", "") == "_lower_version_count_by_1"


def reads_version(target: Any) -> bool:
    """Whether a function in a Dynamo graph is `x._version`."""
    return getattr(target, "__name__", "") == "_tensor_version.default"


def sets_versions(target: Any) -> bool:
    """Whether a function in a Dynamo graph sets version counters back to former values."""
    return getattr(target, "__name__", "") == "_unsafe_set_version_counter.default"


def dynamo_locks() -> tuple[threading.RLock, ...]:
    """The locks that a thread holds while Dynamo compiles in it; none before Dynamo is imported."""
    lock = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    return () if lock is None else (lock,)


def frames_off() -> AbstractContextManager[Any]:
    """Dynamo compiles no frames of this thread in the context: it may be on where a backward is called."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    return nullcontext() if frames is None else _frames_off(frames.set_eval_frame)


@contextmanager
def _frames_off(set_callback: Callable[[Any], Any]) -> Generator[None]:
    before = set_callback(None)
    try:
        yield
    finally:
        set_callback(before)


def compiled_as_written() -> AbstractContextManager[None]:
    """What `torch.compile` made of functions and modules runs as it was written, in this context and thread.

    To whatever it made, the stance (`torch.compiler.set_stance`) is "force_eager" in this thread. Operators
    that take functions (`torch.cond`) still compile these: autograd sees what they close over only then.
    """
    return _AS_WRITTEN.applied(True)


def _stance_in_force() -> list[Place]:
    from torch._dynamo.eval_frame import DynamoStance

    return [(DynamoStance, "stance", property(_stance, _set_stance))]


def _stance(stance: Any) -> str:
    in_eager = _AS_WRITTEN.value and not getattr(_hop_compile_tls, "in_hop_compile", False)
    return "force_eager" if in_eager else vars(stance)["stance"]


def _set_stance(stance: Any, value: str) -> None:
    vars(stance)["stance"] = value


_AS_WRITTEN = Patch[bool]("compiled_as_written", _stance_in_force)


@functools.cache
def keep_from_dynamo(call_of: Callable[[torch.nn.Module], Callable[..., Any] | None]) -> None:
    """Have Dynamo break its graph at a call that we compiled, and run it.

    Dynamo skips our frames, but it inlines the forward of a module whatever its call has been replaced by. So
    its rule for modules asks here first; not under `torch.export`, which cannot break graphs.

    Args:
        call_of: the call of a module that is ours, or None.
    """
    from torch._dynamo.variables.functions import SkipFunctionVariable
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    inline = UnspecializedNNModuleVariable.call_function

    @functools.wraps(inline)
    def call_function(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        call = None if tx.export else call_of(self.value)
        if call is None:
            return inline(self, tx, *args, **kwargs)
        kept = torch.compiler.disable(call, reason="`aotdist.compile` compiled it")
        return SkipFunctionVariable(kept).call_function(tx, *args, **kwargs)

    UnspecializedNNModuleVariable.call_function = call_function
    skip_our_frames()


_PACKAGE = Path(__file__).parent.parent
_RUNS_IN_CALLS = (
    *("aliasing", "capture", "codegen", "convention", "dynamo", "partition", "passes", "runtime", "step"),
    *("subclasses/protocol.py", "torch_seam", "trace"),
    *("api.py", "assumptions.py", "compiled.py", "pipeline.py"),
)


@functools.cache
def skip_our_frames() -> None:
    """Have Dynamo skip the frames of our calls and backwards, which it would compile after a graph break.

    The rest of the package is models and layers, or runs while Dynamo is off.
    """
    from torch._dynamo import trace_rules

    trace_rules.SKIP_DIRS.extend(("<aotdist ", *(str(_PACKAGE / name) for name in _RUNS_IN_CALLS)))
    trace_rules._recompile_re()


def is_compiling_a_frame() -> bool:
    """Whether Dynamo compiles a frame, in this thread, and has called its backend."""
    from torch._guards import CompileContext

    return CompileContext.current_compile_id() is not None


def dynamo_frame() -> str:
    """What Dynamo compiles now: the name of the function, and the compile id (of frame and compilation)."""
    from torch._dynamo import external_utils
    from torch._guards import CompileContext

    code = (TracingContext.get_traced_code() or [None])[0]
    number = CompileContext.current_compile_id()
    # A function of Dynamo's calls PyTorch's own modules; a backward of compiled autograd is a module, too.
    name = "forward" if code is None or code.co_filename == external_utils.__file__ else code.co_name
    name = "backward" if name == "forward" and str(number).startswith("!") else name
    return f"{name} [{number}]"


_compilations = itertools.count()


def is_tracing() -> bool:
    """Whether PyTorch's structured trace is written (`TORCH_TRACE` names a folder)."""
    from torch._logging._internal import LazyTraceHandler, trace_log

    # Without a folder, the handler stays until the first message, and then removes itself.
    unused = (isinstance(one, LazyTraceHandler) and one.root_dir is None for one in trace_log.handlers)
    return not all(unused)


def trace_artifacts(texts: Mapping[str, str]) -> None:
    """Add texts, by name, to PyTorch's structured trace: under the current compile id, or under a new one.

    The graphs of ahead-of-time compilation have names there that `tlparse` knows.
    """
    from torch._guards import CompileContext, CompileId
    from torch._logging import trace_structured

    number = CompileContext.current_compile_id()
    if number is None:
        number = CompileId(frame_id=next(_compilations), frame_compile_id=0)
    for name, text in texts.items():
        payload = functools.partial(str, text)
        if name.endswith("_graph"):
            trace_structured(f"aot_{name}", payload_fn=payload, compile_id=number)
        else:
            facts = functools.partial(dict, name=f"aotdist_{name}", encoding="string")
            trace_structured("artifact", facts, payload_fn=payload, compile_id=number)


def compiling_tapes(
    compiler: Callable[[torch.fx.GraphModule], Any], *, dynamic: bool
) -> AbstractContextManager[None]:
    """Have `compiler` compile the backwards of this thread, each as one graph of all autograd nodes in it.

    Args:
        compiler: from a graph to what is called in its place.
        dynamic: whether one graph serves all sizes.
    """
    from torch._dynamo import compiled_autograd

    return compiled_autograd._enable(compiler, dynamic=dynamic)


forget_tapes: Callable[[], None] = torch._C._dynamo.compiled_autograd.clear_cache
"""Drop the backwards that compiled autograd has compiled."""


def tapes_off() -> AbstractContextManager[None]:
    """Compiled autograd is off in this context: the backward of a trace is not to be compiled by it."""
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is None or not compiled_autograd.compiled_autograd_enabled:
        return nullcontext()
    return compiled_autograd._disable()
