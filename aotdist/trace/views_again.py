"""Inputs that are views, made again of the stand-in of their base.

Autograd makes a view again by `as_strided`, after a view as another dtype where there is one: `z.real` is an
`as_strided` of `view_as_real(z)`. Functionalisation writes through `as_strided` only where no other view
comes before. So such a view is made by operators that do not go by strides: indexing, `permute`, `unsqueeze`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aotdist.aliasing.overwrite import kind_of
from aotdist.subclasses.protocol import is_wrapper
from aotdist.torch_seam.functional import made_again
from aotdist.torch_seam.symbols import hint


def view_again(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor | None:
    """The view of the stand-in `base` that `view` is of its own base; None if there is no way to make it."""
    own = view._base
    assert own is not None, "a view"
    if is_wrapper(view) or kind_of(view) == kind_of(own):
        return made_again(view, base)
    if view.dtype.is_complex and view.dtype.to_real() == own.dtype:
        return _negated(torch.view_as_complex(_pairs(view, base)), view)
    whole = _shown_as(view, base)
    return None if whole is None else _selected(view, whole, _offset(own, whole))


def is_reshaped(view: torch.Tensor, made: torch.Tensor) -> bool:
    """Whether `made`, the stand-in of a view, has other sizes or strides than the view.

    A wrapper that was reshaped in place is made again as the view that it was before (torch 2.13).
    """
    return _shape_of(made) != _shape_of(view)


def _shape_of(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Sizes, and strides of dimensions with several elements, as numbers."""
    sizes = map(hint, tensor.size())
    return [
        (size, hint(stride) if size > 1 else 0) for size, stride in zip(sizes, tensor.stride(), strict=True)
    ]


def _offset(base: torch.Tensor, whole: torch.Tensor) -> int:
    """Where a real tensor starts in its storage, in elements of `whole`, which shows all of its stand-in."""
    return int(base.storage_offset()) * base.element_size() // whole.element_size()


def _pairs(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The elements of the real `base` that a complex view of it shows."""
    strides = [2 * stride for stride in view.stride()]
    return base.as_strided((*view.size(), 2), (*strides, 1), 2 * int(view.storage_offset()))


def _shown_as(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor | None:
    """All of `base`, as the kind of tensor that `view` is; None if there is no operator for it."""
    if view.dtype == base.dtype:
        return _negated(base, view)
    if not base.dtype.is_complex or view.dtype != base.dtype.to_real() or base.is_conj() or base.is_neg():
        return None
    return _negated(torch.view_as_real(base), view)


def _negated(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`tensor` with the conjugate and negative bits of `like`."""
    tensor = tensor if tensor.is_conj() == like.is_conj() else tensor.conj()
    return tensor if tensor.is_neg() == like.is_neg() else torch.ops.aten._neg_view.default(tensor)


def _selected(view: torch.Tensor, whole: torch.Tensor, offset: int) -> torch.Tensor | None:
    """What `view` shows of a tensor of the same dtype, by operators that do not go by strides.

    Args:
        view: the view.
        whole: the tensor.
        offset: where that starts.

    Returns:
        None if only strides can express it.
    """
    starts = _starts(whole, int(view.storage_offset()) - offset)
    if starts is None:
        return None
    picks: list[int | slice] = list(starts)
    dims: list[int] = []
    for size, stride in zip(view.size(), view.stride(), strict=True):
        if size == 1:
            continue
        left = [dim for dim in range(whole.dim()) if dim not in dims]
        dim = next((dim for dim in left if _fits(whole, dim, starts[dim], size, stride)), None)
        if dim is None:
            return None
        step = stride // whole.stride(dim)
        picks[dim] = slice(starts[dim], starts[dim] + (size - 1) * step + 1, step)
        dims.append(dim)
    shown = whole[tuple(picks)].permute([sorted(dims).index(dim) for dim in dims])
    for dim in (dim for dim, size in enumerate(view.size()) if size == 1):
        shown = shown.unsqueeze(dim)
    return shown


def _starts(whole: torch.Tensor, offset: int) -> Sequence[int] | None:
    """The index of the element that lies `offset` behind the first; None if there is none."""
    starts = [0] * whole.dim()
    for dim in sorted(range(whole.dim()), key=whole.stride, reverse=True):
        if whole.size(dim) > 1 and whole.stride(dim) > 0:
            starts[dim], offset = divmod(offset, whole.stride(dim))
    is_inside = offset == 0 and all(map(int.__lt__, starts, whole.size()))
    return starts if is_inside else None


def _fits(whole: torch.Tensor, dim: int, start: int, size: int, stride: int) -> bool:
    """Whether a dimension of `size` steps of `stride` is a slice of dimension `dim`, from `start`."""
    step, rest = divmod(stride, whole.stride(dim) or stride + 1)
    return rest == 0 < step and start + (size - 1) * step < whole.size(dim)
