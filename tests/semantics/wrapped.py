"""Short names for wrapper tensors, for programs that are written out as text."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from aotdist.subclasses.float8_tensor import E4M3, E5M2, amax_of, cast, scale_for
from aotdist.subclasses.sparse24_selection import sparsify


def in_8_bits(x: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """A Float8Tensor, or a DTensor around one, with one scale."""
    return cast(x, scale_for(amax_of(x), dtype), dtype)


class Product8(torch.autograd.Function):
    """A product in 8 bits, whose gradients are products in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x8, w8 = in_8_bits(x), in_8_bits(w)
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x8, w8 = ctx.saved_tensors
        grad8 = in_8_bits(grad, E5M2)
        return in_8_bits(grad, E5M2) @ w8, grad8.t() @ x8


def over_mesh(local: torch.Tensor, placement: Placement | None = None) -> DTensor:
    """A DTensor on a mesh of one rank, of rows unless another placement is given."""
    return DTensor.from_local(local, _mesh(), [placement or Shard(0)], run_check=False)


@functools.cache
def _mesh() -> DeviceMesh:
    """Made once, by the rehearsal of a program: making one reads data, which no trace can."""
    return dist.init_device_mesh("cpu", (1,))


def whole(tensor: DTensor) -> DTensor:
    """The same on all ranks."""
    return tensor.redistribute(placements=[Replicate()])


WRAPPED = {
    "in_8_bits": in_8_bits,
    "product_8": Product8.apply,
    "sparsify": sparsify,
    "over_mesh": over_mesh,
    "whole": whole,
    "Shard": Shard,
    "Replicate": Replicate,
}
"""By the names that programs use."""
