"""What copies of recorded calls (`aotdist.trace.blocks`) ask of autograd."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from aotdist.torch_seam.autograd import is_custom, run_backward, sequence_nr, starts_of_backwards
from aotdist.torch_seam.modes import torch_functions_off


def hears_saved_tensors() -> bool:
    """Whether a checkpoint, or another hook of saved tensors, is around what runs now."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # noqa: FBT003


def consumers_within(
    ends: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], first: int
) -> tuple[list[Any], list[tuple[Any, int, int]] | None]:
    """The autograd nodes made since one with the number `first` that are behind `ends`.

    And which of them send gradients to `tensors`, made before: the node, the position among what it sends,
    and the position of the tensor; None if one sends a gradient elsewhere.
    """
    with torch_functions_off():
        made = (
            (k, tensor.grad_fn, tensor.output_nr) for k, tensor in enumerate(tensors) if tensor.requires_grad
        )
        positions: dict[Any, int] = {
            (id(tensors[k]), 0) if node is None else (node, number): k for k, node, number in made
        }
        pending: list[Any] = [tensor.grad_fn for tensor in ends]
    inner, consumers = dict.fromkeys(pending), list[tuple[Any, int, int]]()
    while pending:
        node = pending.pop()
        for sent, (source, number) in enumerate(node.next_functions):
            if source is None or source in inner:
                continue
            leaf = getattr(source, "variable", None)
            if (position := positions.get((source if leaf is None else id(leaf), number))) is not None:
                consumers.append((node, sent, position))
            elif leaf is not None or sequence_nr(source) < first:
                return list(inner), None
            else:
                inner[source] = None
                pending.append(source)
    return list(inner), consumers


def functions_of(nodes: Iterable[Any]) -> list[type]:
    """The classes of the Python autograd functions among autograd nodes."""
    return [node._forward_cls for node in nodes if is_custom(node)]


@contextmanager
def hooks_off(tensors: Sequence[torch.Tensor]) -> Generator[None]:
    """In this context, the hooks of the gradients of `tensors` are not called."""
    with torch_functions_off():
        held = [hooks for tensor in tensors if (hooks := tensor._backward_hooks)]
    before = [dict(hooks) for hooks in held]
    for hooks in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, items in zip(held, before, strict=True):
            hooks.update(items)


def run_backward_up_to(
    outs: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """`run_backward`, but nothing goes on from one of `wanted` to another; the graph is kept."""
    with torch_functions_off():
        nodes = {tensor.grad_fn for tensor in wanted if tensor.grad_fn is not None}
    with ExitStack() as hooks:
        for node in nodes:
            hooks.enter_context(node.register_prehook(lambda grads: (None,) * len(grads)))
        return run_backward(outs, wanted, tangents, retain_graph=True, create_graph=False)


def tensor_ids_of_roots() -> set[int]:
    """Identities of the tensors from which the running backwards of this thread started."""
    starts = starts_of_backwards(sys._getframe())
    return {id(root) for frame in starts for root in frame.f_locals["t_outputs"]}
