"""Sums of what is scattered, in one order.

As `scatter_add` the library adds up floating point at one place atomically on a GPU, in another order in each
run; as `index_put` it sorts by place first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from aotdist.torch_seam.operators import OpOverload

aten = torch.ops.aten


def decompositions() -> Mapping[OpOverload, Callable[..., Any]]:
    """`scatter_add`, which the backward of `gather` is, as an operator that sorts."""
    return {aten.scatter_add.default: _scatter_add}


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
