"""Where the largest and smallest elements lie: operators that find places, as reductions of values.

The place of the largest element is the smallest of the places that hold it: two reductions, which share a
kernel with whatever else is done to a row. As PyTorch has it, the first of equal elements counts, zeros of
both signs are equal, and the first that is no number is larger and smaller than all numbers. The value is
that at the place found, sign of zero included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from aotdist.torch_seam.operators import OpOverload

_ATEN = torch.ops.aten


def decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """Each operator, and what it is made of."""
    return {
        _ATEN.argmax.default: _place_of(torch.amax),
        _ATEN.argmin.default: _place_of(torch.amin),
        _ATEN.max.dim: _value_and_place_of(torch.amax),
        _ATEN.min.dim: _value_and_place_of(torch.amin),
    }


def _place_of(extreme: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def found(x: torch.Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        if not _has_places(x):
            return NotImplemented
        if dim is not None:
            return _places(x, dim, extreme, keepdim)
        place = _places(x.reshape(-1), 0, extreme, keepdim)
        return place.reshape([1] * x.dim()) if keepdim else place

    return found


def _value_and_place_of(extreme: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    def found(x: torch.Tensor, dim: int, keepdim: bool = False) -> Any:
        if not _has_places(x):
            return NotImplemented
        place = _places(x, dim, extreme, keepdim=True)
        only = torch.where(_numbered(x, dim) == place, x, _least(x.dtype, extreme))
        value = extreme(only, dim, keepdim=True)
        return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))

    return found


def _has_places(x: torch.Tensor) -> bool:
    """Whether there is something to number, and as much of it in every call."""
    return x.dim() > 0 and all(type(size) is int and size > 0 for size in x.shape)


def _places(x: torch.Tensor, dim: int, extreme: Callable[..., torch.Tensor], keepdim: bool) -> torch.Tensor:
    holds = x == extreme(x, dim, keepdim=True)
    if x.is_floating_point():
        holds = holds | torch.isnan(x)
    return torch.where(holds, _numbered(x, dim), x.size(dim)).amin(dim, keepdim=keepdim)


def _numbered(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The places along a dimension, which broadcast against `x`."""
    sizes = [1] * x.dim()
    sizes[dim] = x.size(dim)
    return torch.arange(x.size(dim), device=x.device).view(sizes)


def _least(dtype: torch.dtype, extreme: Callable[..., torch.Tensor]) -> float | int | bool:
    """What is never the extreme of two."""
    is_largest = extreme is torch.amax
    if dtype == torch.bool:
        return not is_largest
    if dtype.is_floating_point:
        return float("-inf" if is_largest else "inf")
    return torch.iinfo(dtype).min if is_largest else torch.iinfo(dtype).max
