"""What the emitter decomposes by itself: extremes with places, foreach operators, scattered sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from aotdist.torch_seam.operators import OpOverload, argument_names

aten = torch.ops.aten


def decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """Each operator, and what it is made of."""
    return {
        aten.argmax.default: _place_of(torch.amax),
        aten.argmin.default: _place_of(torch.amin),
        aten.max.dim: _value_and_place_of(torch.amax),
        aten.min.dim: _value_and_place_of(torch.amin),
        aten.scatter_add.default: _scatter_add,
        **_foreach_operators(),
    }


# Where the largest and smallest elements lie.
#
# The place of the largest element is the smallest of the places that hold it: two reductions, which share a
# kernel with whatever else is done to a row. As in PyTorch, the first of equal elements counts, zeros of both
# signs are equal, and the first NaN is larger and smaller than all numbers. The value is that at the place
# found, sign of zero included.


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


# Foreach operators as one operator for each tensor of their lists.
#
# Optimizers call one operator on lists of all parameters, so that a GPU is not handed a kernel for each. One
# by one, the operators of a parameter share a kernel, and `bundling.py` launches those of all parameters
# together.

_NAMES = (
    "abs", "add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "copy", "div", "exp", "lerp", "log",
    "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "rsqrt", "sigmoid", "sign", "sqrt", "sub",
    "tanh",
)  # fmt: skip
_OTHERWISE_NAMED = {"norm": "linalg_vector_norm"}
_BY_KEYWORD = {"value": "value", "scalars": "value", "alpha": "alpha", "dtype": "dtype"}
"""Arguments that the operator of one tensor takes by keyword only, and how it calls them."""
_LEFT_ALONE = frozenset({"addcdiv.Tensor", "addcmul.Tensor"})
"""A tensor of one number for each list item, which only the device knows."""


def _foreach_operators() -> dict[OpOverload, Callable[..., Any]]:
    made: dict[OpOverload, Callable[..., Any]] = {}
    for name in (*_NAMES, *_OTHERWISE_NAMED):
        packet = getattr(aten, f"_foreach_{name}")
        one = getattr(aten, _OTHERWISE_NAMED.get(name, name))
        for overload in packet.overloads():
            is_out = overload == "out" or overload.endswith("_out")
            if not is_out and f"{name}.{overload}" not in _LEFT_ALONE:
                op = getattr(packet, overload)
                made[op] = partial(_each, argument_names(op), one)
    return made


def _each(names: Sequence[str], one: Callable[..., Any], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """What `one` makes of each item of the lists among some named arguments."""
    given = dict(zip(names, args, strict=False)) | kwargs
    given.pop("non_blocking", None)
    lists = {name: value for name, value in given.items() if isinstance(value, (list, tuple))}
    results: list[torch.Tensor] = []
    for items in zip(*lists.values(), strict=True):
        own = given | dict(zip(lists, items, strict=True))
        keywords = {_BY_KEYWORD[name]: own.pop(name) for name in list(own) if name in _BY_KEYWORD}
        results.append(one(*own.values(), **keywords))
    return results


# Sums of what is scattered, in one order: on a GPU `scatter_add`, the backward of `gather`, adds floating
# point atomically, in another order in each run; `index_put` sorts by place first.


def _scatter_add(tensor: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if not tensor.dim() or not tensor.is_floating_point():
        return NotImplemented  # a sum of integers is the same in any order
    places = [
        torch.arange(size, device=index.device).view([-1 if at == own else 1 for own in range(index.dim())])
        for at, size in enumerate(index.shape)
    ]
    places[dim] = index
    values = source[tuple(slice(size) for size in index.shape)]
    return aten.index_put.default(tensor, places, values, True)
