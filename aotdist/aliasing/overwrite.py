"""Overwriting a caller's tensor outside of the autograd node, with the history that eager would give it.

`copy_` would send a gradient of zeros to the old value, which gets its gradient from the node; and plain
zeros if it is a wrapper. The version counters are set here, too: by these autograd notices that a saved
tensor was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from aotdist.subclasses.protocol import inner_tensors, is_wrapper
from aotdist.torch_seam.autograd import CreationMeta, creation_meta
from aotdist.torch_seam.tensors import preserved_version, set_versions


class _Put(torch.autograd.Function):
    """Overwrites a tensor; its old value gets no gradient from this node.

    Except for a view: autograd assembles the gradient of its base, and needs zeros for the overwritten part.
    """

    @staticmethod
    def forward(ctx: Any, target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        target.data.copy_(value)
        ctx.set_materialize_grads(False)  # zeros would be plain ones, for a wrapper too
        ctx.is_view = target._is_view()
        ctx.mark_dirty(target)  # bumps the version once
        return target

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if grad is None or not (ctx.is_view and ctx.needs_input_grad[0]):
            return None, grad
        return torch.zeros_like(grad), grad


def base_behind(tensor: torch.Tensor) -> torch.Tensor | None:
    """The base of `tensor`, if a write to one of the two gives the other a new history; else None."""
    base = tensor._base
    if base is None or tensor.requires_grad != base.requires_grad or tensor.numel() == 0:
        return None
    return base


def is_made_again(view: torch.Tensor) -> bool:
    """Whether a tensor is a wrapper whose history autograd rebuilds once its base was written.

    It may have been reshaped in place since it was made, which only the trace sees.
    """
    base = base_behind(view)
    return base is not None and base.requires_grad and is_wrapper(view)


def kind_of(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    """The dtype of a tensor, and whether its conjugate and negative bits are set."""
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def are_written_alone(written: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether `put` can write each of `written`, as no two inputs are views of one base.

    Otherwise the program has to be traced with the base as an input.
    """
    bases = [base_behind(tensor) for tensor in written]
    if not any(base is not None for base in bases):
        return True
    known = [*map(id, bases), *(id(base_behind(tensor)) for tensor in others)]
    alone = (base is None or known.count(id(base)) == 1 for base in bases)
    return all(alone) and not any(map(is_made_again, written))


def refuse_forbidden(*targets: torch.Tensor) -> None:
    """Let autograd raise for views that it forbids to write, before anything is written.

    Raises:
        RuntimeError: one is of several that an operator returned, made by an autograd function, or the like.
    """
    for target in targets:
        if creation_meta(target) not in (None, CreationMeta.DEFAULT):
            with torch.enable_grad():
                target.copy_(target.detach().requires_grad_())


def put(target: torch.Tensor, value: torch.Tensor, bumps: int) -> None:
    """Overwrite `target` with `value` and its history, and count `bumps` writes."""
    with nullcontext() if bumps else uncounted(target):
        _Put.apply(target, value)
    bump(target, bumps - 1)


def uncounted(target: torch.Tensor) -> AbstractContextManager[None]:
    """A context in which writes to `target` do not count in its version counter."""
    return nullcontext() if target.is_inference() else preserved_version(target)


def version_of(tensor: torch.Tensor) -> int:
    """The version counter; 0 for a tensor that has none."""
    return 0 if tensor.is_inference() else tensor._version


def bump(target: torch.Tensor, count: int) -> None:
    """Increase the version counter of `target` by `count`."""
    if count and not target.is_inference():
        torch.autograd.graph.increment_version([target] * count)


def rewind(target: torch.Tensor, count: int) -> None:
    """Decrease the version counter of `target` by `count`, for as many writes that will be repeated."""
    if not target.is_inference():
        set_versions((target,), (target._version - count,))


def written_uncounted(args: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors that an operator on lists with wrappers may write: eager does not count these writes."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    if not any(isinstance(item, torch.Tensor) and is_wrapper(item) for items in lists for item in items):
        return []
    written = [item for item in lists[0] if isinstance(item, torch.Tensor)]
    return [tensor for item in written for tensor in (item, *(inner for _, inner in inner_tensors(item)))]


def all_uncounted(targets: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """`uncounted` for each of them."""
    stack = ExitStack()
    for target in targets:
        stack.enter_context(uncounted(target))
    return stack
