"""The autograd engine: histories, nodes, hooks, and running a backward."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import sys
import threading
import types
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

# What autograd knows of how a view was made.
from torch._C._autograd import CreationMeta as CreationMeta
from torch.autograd.function import _SingleLevelFunction
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from aotdist.torch_seam.modes import torch_functions_off

next_sequence_nr: Callable[[], int] = torch.autograd._get_sequence_nr
"""The number that the next autograd node made by this thread will carry."""


def has_several_results(tensor: torch.Tensor) -> bool:
    """Whether the node that made a tensor made others with it."""
    return tensor.grad_fn is not None and len(tensor.grad_fn._input_metadata) > 1


def sequence_nr(node: Any) -> int:
    """The sequence number of an autograd node; no two nodes that one thread makes have the same."""
    return node._sequence_nr()


def running_node() -> tuple[int | None, str]:
    """Sequence number and name of the autograd node whose backward is running; None outside backward."""
    node = torch._C._current_autograd_node()
    return (None, "") if node is None else (node._sequence_nr(), node.name())


ACCUMULATION = "torch::autograd::AccumulateGrad"
"""The autograd node that adds to `.grad`, where a user's function runs a backward: it has no number."""


def run_backward(
    outs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor | GradientEdge],
    tangents: Sequence[torch.Tensor],
    *,
    retain_graph: bool,
    create_graph: bool,
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad(outs, wanted, tangents, allow_unused=True)`, without being a torch function.

    The public one is overridable, so a torch-function mode is popped for as long as it runs.
    """
    return _engine_run_backward(
        tuple(outs), tuple(tangents), retain_graph, create_graph, tuple(wanted), True, accumulate_grad=False
    )


REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
"""The autograd node of a checkpoint with `use_reentrant=True` that runs as PyTorch wrote it."""


Region: TypeAlias = tuple[range, frozenset[tuple[Any, int]]]
"""What a checkpoint ran: sequence numbers of the autograd nodes in it, and where its results come from."""


def is_read_otherwise(tensors: Sequence[torch.Tensor], regions: Iterable[Region]) -> bool:
    """Whether more than the results of a region is read from outside, in the history of `tensors`."""
    nodes = sorted(nodes_behind(tensors), key=sequence_nr)
    numbers = list(map(sequence_nr, nodes))
    reads: dict[Any, list[tuple[int | None, int]]] = {}  # of a node: who reads which of what it makes
    for tensor in tensors:
        reads.setdefault(tensor.grad_fn, []).append((None, tensor.output_nr))
    for node, number in zip(nodes, numbers, strict=True):
        for source, output_nr in node.next_functions:
            reads.setdefault(source, []).append((number, output_nr))
    for region, results in regions:
        inside = nodes[bisect_left(numbers, region.start) : bisect_left(numbers, region.stop)]
        found = ((reader, (node, output_nr)) for node in inside for reader, output_nr in reads[node])
        if any(reader not in region and made not in results for reader, made in found):
            return True
    return False


@contextmanager
def saved_tensor_hooks_off() -> Generator[None]:
    """Switch hooks of saved tensors off: a checkpoint around a call must not see what its capture saves."""
    hooks = torch._C._autograd

    def pop_all() -> list[tuple[Any, Any]]:
        popped: list[tuple[Any, Any]] = []
        while (one := hooks._top_saved_tensors_default_hooks(False)) is not None:  # noqa: FBT003
            hooks._pop_saved_tensors_default_hooks()
            popped.append(one)
        return popped

    ours = pop_all()
    try:
        yield
    finally:
        pop_all()  # what the program left
        for pack, unpack in reversed(ours):
            hooks._push_saved_tensors_default_hooks(pack, unpack)


def has_history_of_its_own(tensor: torch.Tensor) -> bool:
    """Whether a tensor that shows the memory of another has a history that replaying views would lose.

    A user's `autograd.Function` made it, or it was written, and autograd does not know it as a view.
    """
    history = history_of(tensor)
    return isinstance(history, torch.autograd.function.BackwardCFunction) or (
        history is not None and not tensor._is_view()
    )


def history_of(tensor: torch.Tensor) -> Any | None:
    """The autograd node that made a tensor, if autograd can tell."""
    try:
        return tensor.grad_fn
    except RuntimeError:  # a view made under `no_grad`, of a base that was written since
        return None


def is_leaf_with_grad(tensor: torch.Tensor) -> bool:
    """Whether a tensor requires grad and nothing made it; False where autograd cannot tell."""
    return _is_leaf(tensor) and tensor.requires_grad


def accumulated_into(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a leaf that has a gradient."""
    return _is_leaf(tensor) and tensor.grad is not None


def _is_leaf(tensor: torch.Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:  # of a view made under `no_grad` whose base was written since
        return False


def creation_meta(tensor: torch.Tensor) -> Any:
    """How autograd noted that a view was made, which decides how it treats writes; None for no view."""
    return torch._C._autograd._get_creation_meta(tensor) if tensor._is_view() else None


def set_creation_meta(tensor: torch.Tensor, creation: Any) -> None:
    """Set what `creation_meta` gets, for a view; nothing for other tensors."""
    if creation is not None and tensor._is_view():
        torch._C._autograd._set_creation_meta(tensor, creation)


def custom_functions(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Names of the Python autograd functions in the history of `tensors`, each once."""
    return list(dict.fromkeys(node.name() for node in _custom_nodes(tensors)))


def leaves_behind(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves in the history of `tensors`, each once."""
    return [node.variable for node in nodes_behind(tensors) if hasattr(node, "variable")]


def mixes_gradients(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a Python autograd function in the history of `tensors` may treat None and zeros differently.

    It may if it has several results; or if list operators follow it, which send None to some functions, and
    so zeros beyond them. Functions of ours that treat both the same way are marked by `passes_gradients_on`.
    """
    lists = [node for node in nodes_behind(tensors) if node.name().startswith("Foreach")]
    nodes = [node for node in _custom_nodes(tensors) if len(node._input_metadata) > 1]
    return any(
        not getattr(node._forward_cls, "passes_gradients_on", False)
        for node in (*nodes, *filter(is_custom, _nodes_from(lists)))
    )


def _custom_nodes(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return list(filter(is_custom, nodes_behind(tensors)))


def is_custom(node: Any) -> bool:
    """Whether an autograd node is of a function in Python."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def nodes_behind(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The autograd nodes in the history of `tensors`, each once."""
    return _nodes_from([tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None])


def saves_tensors(node: Any) -> bool:
    """Whether an autograd node has saved tensors, which one backward frees for the next.

    They are read raw: what a checkpoint saved is computed again when it is asked for.
    """
    for name in _names_of_saved(type(node)):
        try:
            raw = getattr(node, name)
        except RuntimeError:  # a list of tensors, which one backward has freed
            continue
        if any(saved.data is not None for saved in (raw if isinstance(raw, tuple) else (raw,))):
            return True
    return False


@functools.cache
def _names_of_saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _nodes_from(nodes: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    pending = list(nodes)
    seen = set(pending)
    while pending:
        node = pending.pop()
        found.append(node)
        for source, _ in node.next_functions:
            if source is not None and source not in seen:
                seen.add(source)
                pending.append(source)
    return found


def retains_grad(tensor: torch.Tensor) -> bool:
    """Whether a tensor with history keeps its gradient (`retain_grad`)."""
    with torch_functions_off():
        return tensor.retains_grad


def released_history(tensor: torch.Tensor) -> str | None:
    """Autograd's error for a tensor, if saved tensors were freed on all its paths to leaves; else None."""
    said = None
    pending = [] if tensor.grad_fn is None else [tensor.grad_fn]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if hasattr(node, "variable"):
            return None
        freed = _freed(node)
        said = said or freed
        sources = () if freed else [source for source, _ in node.next_functions if source is not None]
        pending += [source for source in sources if source not in seen]
        seen.update(sources)
    return said


def _freed(node: Any) -> str | None:
    """Autograd's error for reading what a node of its own saved, if that was freed; else None."""
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                getattr(node, name)
            except RuntimeError as error:
                return str(error)
    return None


def in_backward() -> bool:
    """Whether the autograd engine is running: a forward inside it is a recomputation (checkpointing)."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(call: Callable[[], None]) -> None:
    """Let the running backward call `call` when it is over, unless it fails."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def in_thread_of_engine() -> bool:
    """Whether a backward runs in a thread of the autograd engine's own, not in the one that asked for it."""
    return in_backward() and isinstance(threading.current_thread(), threading._DummyThread)


class _Node(_SingleLevelFunction):
    """The base class of the autograd nodes of compiled programs.

    Not `torch.autograd.Function`, whose `apply` searches all arguments for wrappers of `torch.func`
    transforms: 10 us for 100. A compiled call under a transform never gets here.
    """

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int]:
        """The key of a node on a tape that PyTorch compiles; our backwards are called as they are there."""
        cls = ctx._forward_cls
        if not hasattr(cls.backward, "_torchdynamo_orig_callable"):
            cls.backward = staticmethod(torch.compiler.disable(cls.backward))
        return (ctx._autograd_function_id,)


def node_base() -> type[Any]:
    """The base class of our autograd nodes, whose `apply` is C++ alone."""
    return _Node


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the running backward was asked to keep what it saved (`retain_graph=True`)."""


def failing_in_backward(tensor: torch.Tensor, reason: str) -> torch.Tensor:
    """`tensor` as one that requires grad, and whose backward raises a `RuntimeError`."""
    with torch.enable_grad():
        return torch._C._functions.DelayedError(reason.encode(), 1)(tensor.detach().requires_grad_())


def is_once_differentiable(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether the history of `tensors` ends at a function that is `@once_differentiable`."""
    return any(node.name() == "torch::autograd::Error" for node in nodes_behind(tensors))


def chosen_in_backward() -> list[Any] | None:
    """The nodes of non-leaves whose gradients the running backward computes (`torch.autograd.grad`).

    The engine does not tell which of the tensors that it passes are chosen; the frames of the functions that
    started it do. In a thread of the engine it is not known which of them started this one, so these are
    those of all running backwards; None if no Python function started one.
    """
    tops = sys._current_frames().values()
    starts = [frame.f_locals["args"] for top in tops for frame in starts_of_backwards(top)]
    chosen = [tensor for _, _, _, inputs, *_ in starts for tensor in inputs]
    nodes = [one.grad_fn if isinstance(one, torch.Tensor) else one.node for one in chosen]
    return [node for node in nodes if node is not None and not hasattr(node, "variable")] if starts else None


def starts_of_backwards(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """Of a frame and those behind it, those that started a backward."""
    while frame is not None:
        if frame.f_code is _engine_run_backward.__code__:
            yield frame
        frame = frame.f_back


backward_task: Callable[[], int] = torch._C._current_graph_task_id
"""A number for the running backward, different for each."""


def runs_in_backward(leaf: torch.Tensor) -> bool:
    """Whether the running backward will accumulate into `leaf`."""
    return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
