"""Overwriting a tensor outside of the autograd node, so that it gets the history that eager would give it.

`copy_` would do, except for two things. It sends zeros to the old value, whose gradient comes from the
region, and -0.0 + 0.0 is 0.0. And a view shares its base's history: eager's `CopySlices` assembles the base's
gradient from those of the written part and of the rest; `copy_` would add them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.aliasing.version import bump, uncounted
from aotdist.subclasses.protocol import is_wrapper
from aotdist.torch_seam.autograd import CreationMeta, creation_meta


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a view lies in its base.

    Args:
        whole: sizes and strides of the base.
        part: sizes, strides and offset of the view.
    """

    whole: tuple[torch.Size, tuple[int, ...]]
    part: tuple[torch.Size, tuple[int, ...], int]

    @classmethod
    def of(cls, view: torch.Tensor, base: torch.Tensor) -> _Place:
        offset = int(view.storage_offset()) - int(base.storage_offset())
        return cls((base.size(), base.stride()), (view.size(), view.stride(), offset))

    def laid_out(self, tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        """`tensor`, of the base's sizes, with the base's strides too, at the start of its storage."""
        size, stride = self.whole
        if not copy and tensor.stride() == stride and tensor.storage_offset() == 0:
            return tensor
        return tensor.new_empty_strided(size, stride).copy_(tensor)

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros of the base's sizes and strides."""
        return like.new_empty_strided(*self.whole).zero_()

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor laid out as the base that lies where the view does."""
        return tensor.as_strided(*self.part)


class _Take(torch.autograd.Function):
    """The view that is to be overwritten, and the rest of its base.

    The backward assembles the base's gradient as eager's `CopySlices` does: where the view lies, that of the
    view; elsewhere, that of the rest. Adding them would turn -0.0 into 0.0.
    """

    @staticmethod
    def forward(ctx: Any, base: torch.Tensor, view: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.place = _Place.of(view, base)
        return view.detach(), base.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        of_view, of_rest = grads
        if of_rest is None and of_view is None:
            return None, None
        if of_rest is None:  # what was written is not differentiated, only what was made of it before
            together = ctx.place.zeros(of_view)
        else:
            together = ctx.place.laid_out(of_rest, copy=True)
        part = ctx.place.part_of(together)
        if of_view is None:
            part.zero_()
        else:
            part.copy_(of_view)
        return together, None


class _Put(torch.autograd.Function):
    """Overwrites a tensor, or a view of it; the old value gets no gradient from this node.

    The region computes the old value's gradient; `copy_` would add zeros to it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        target: torch.Tensor,
        value: torch.Tensor,
        rest: torch.Tensor | None,
        view: torch.Tensor | None,
    ) -> torch.Tensor:
        part = target if view is None else view
        part.data.copy_(value)
        ctx.set_materialize_grads(False)  # zeros would be plain ones, for a wrapper too
        ctx.place = None if view is None else _Place.of(view, target)
        ctx.mark_dirty(target)  # bumps the version once
        return target

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if grad is None:
            return None, None, None, None
        if ctx.place is None:
            return None, grad, None, None
        return None, ctx.place.part_of(ctx.place.laid_out(grad)), grad, None


def base_behind(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `tensor` is a view of, if a write of one gives the other a history; else None."""
    base = tensor._base
    if base is None or tensor.requires_grad != base.requires_grad or tensor.numel() == 0:
        return None
    return base


def is_written_alone(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether `take` and `put` can write a view as eager does, if no other input is a view of its base.

    They find it in its base by its strides, which fails for wrappers, and for a base of another dtype. If no
    gradient reaches the base otherwise, autograd does everything.
    """
    return not base.requires_grad or (not is_wrapper(view) and kind_of(view) == kind_of(base))


def kind_of(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    """The dtype of a tensor, and whether it is conjugated or negated."""
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def are_written_alone(written: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether `take` and `put` can write each of `written`; if not, the trace has to see the base."""
    views = [(tensor, base) for tensor in written if (base := base_behind(tensor)) is not None]
    if not views:
        return True
    bases = [id(base_behind(tensor)) for tensor in (*written, *others)]
    return all(is_written_alone(view, base) and bases.count(id(base)) == 1 for view, base in views)


def refuse_forbidden(*targets: torch.Tensor) -> None:
    """Let autograd raise, before anything is done, for views that it forbids to write.

    Raises:
        RuntimeError: one is of several that an operator returned, made by an autograd function, or the like.
    """
    for target in targets:
        if creation_meta(target) not in (None, CreationMeta.DEFAULT):
            with torch.enable_grad():
                target.copy_(target.detach().requires_grad_())


def take(target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The region's argument for an input that it writes with history, and the rest of its base, for `put`."""
    base = target._base
    if base is None or not (base.requires_grad and target.requires_grad) or is_wrapper(target):
        return target, None
    return _Take.apply(base, target)


def put(target: torch.Tensor, rest: torch.Tensor | None, value: torch.Tensor, bumps: int) -> None:
    """Overwrite `target` with `value` and its history, and count `bumps` writes."""
    with nullcontext() if bumps else uncounted(target):
        if rest is None:
            _Put.apply(target, value, None, None)
        else:
            _Put.apply(target._base, value, rest, target)
    bump(target, bumps - 1)
