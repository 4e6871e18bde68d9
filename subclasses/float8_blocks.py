"""Matrices in 8 bits with a scale for each block, and their products.

`mm_blocks` chooses its kernel when it runs, by `choose_kernel`: cuBLAS's block-scaled product where there is
one, which scales each sum of 128 products before it adds it; else a product of the dequantised operands, in
bf16 on a GPU and in fp32 on a CPU. fp32 differs from cuBLAS's kernel in the order of its sums only.

Shapes: M rows of the left operand, N of the right one, K the dimension that is summed over, of whole blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from aotdist.subclasses.own_operators import capability_of, define

Block: TypeAlias = tuple[int, int]
"""Rows and columns that share a scale."""

TILE: Block = (1, 128)
"""The block of activations and gradients: 128 elements along the dimension that is summed over."""
SQUARE: Block = (128, 128)
"""The block of weights: a square, so that the transposed weight has the same scales."""

ALIGNMENT = 16
"""Sizes of matrices in 8 bits are multiples of this, for the kernels of a GPU."""

Kernel: TypeAlias = Literal["blockwise", "bf16", "fp32"]

_functional: Any = nn.functional  # to type checkers, `ScalingType` is not there
_RECIPES: Mapping[Block, int] = {
    TILE: _functional.ScalingType.BlockWise1x128.value,
    SQUARE: _functional.ScalingType.BlockWise128x128.value,
}
_BLOCKS_IN_MEMORY = 4
"""For squares, the kernel wants multiples of 4 scales along K, which are aligned to 16 bytes."""


def choose_kernel(capability: tuple[int, int] | None, cuda: str | None, left: Block, right: Block) -> Kernel:
    """The kernel that computes a product.

    cuBLAS has block scaling from CUDA 12.9 on, for compute capability 9.x alone, and not for squares on both
    sides. Tensor cores multiply bf16 from 8.0 on.

    Args:
        capability: of the GPU; None for any other device.
        cuda: the version of CUDA that PyTorch was built with, if any.
        left: the block of the left operand.
        right: the block of the right operand, whose columns are summed over, too.
    """
    if capability is None or capability < (8, 0):
        return "fp32"
    has_kernel = capability[0] == 9 and cuda is not None and _numbers(cuda) >= (12, 9)
    is_known = {left, right} <= _RECIPES.keys() and (left, right) != (SQUARE, SQUARE)
    return "blockwise" if has_kernel and is_known else "bf16"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def in_blocks(x: torch.Tensor, block: Block) -> torch.Tensor:
    """`x` cut into blocks, the last ones padded with zeros.

    Shapes: (rows, columns) -> (blocks, block rows, blocks, block columns).
    """
    rows, columns = (-(-size // length) for size, length in zip(x.shape, block, strict=True))
    padding = (0, columns * block[1] - x.size(1), 0, rows * block[0] - x.size(0))
    return nn.functional.pad(x, padding).view(rows, block[0], columns, block[1])


def flat(blocks: torch.Tensor) -> torch.Tensor:
    """The inverse of `in_blocks`, with the padding."""
    return blocks.flatten(2).flatten(0, 1)


def multiplied_out(float8: torch.Tensor, scale: torch.Tensor, block: Block) -> torch.Tensor:
    """The dequantised matrix in fp32, with the padding."""
    return flat(in_blocks(float8.float(), block) * scale[:, None, :, None])


def _run(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    blocks = _block_of(left, left_scale), _block_of(right, right_scale)
    kernel = choose_kernel(capability_of(left.device), torch.version.cuda, *blocks)
    if kernel == "blockwise" and left.numel() and right.numel():
        return _run_blockwise(left, left_scale, right, right_scale, dtype)
    wide = torch.bfloat16 if kernel == "bf16" else torch.float32
    operands = (left, left_scale, blocks[0]), (right, right_scale, blocks[1])
    a, b = (multiplied_out(*operand).to(wide) for operand in operands)
    return torch.mm(a, b.t()).to(dtype)


def _run_blockwise(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """CuBLAS's product. Of 16-bit results it computes bf16 only, and it has no fast accumulation."""
    rows, missing = left.size(0), -left.size(0) % ALIGNMENT
    if missing:  # an odd number of tokens
        left = torch.cat([left, left.new_zeros(missing, left.size(1))])
        left_scale = torch.cat([left_scale, left_scale.new_ones(missing, left_scale.size(1))])
    a, a_recipe = _laid_out(left_scale, _block_of(left, left_scale))
    b, b_recipe = _laid_out(right_scale, _block_of(right, right_scale))
    exact = dtype if dtype == torch.bfloat16 else torch.float32
    product = torch.ops.aten._scaled_mm_v2.default(
        left, right.t(), [a], [a_recipe], [], [b], [b_recipe], [], None, exact
    )
    return (product[:rows].clone() if missing else product).to(dtype)


def _laid_out(scale: torch.Tensor, block: Block) -> tuple[torch.Tensor, int]:
    """Scales in the kernel's memory layout, and its recipe for their blocks.

    Shapes: (rows, blocks) -> for tiles the same, column-major; for squares transposed, and padded along K.

    Source: cuBLAS, "1D and 2D Block Scaling for FP8"; `_meta_registrations.py` checks it.
    """
    if block == TILE:
        return scale.t().clone(memory_format=torch.contiguous_format).t(), _RECIPES[block]
    filled = nn.functional.pad(scale, (0, -scale.size(1) % _BLOCKS_IN_MEMORY), value=1.0)
    return filled.clone(memory_format=torch.contiguous_format).t(), _RECIPES[block]


def _block_of(float8: torch.Tensor, scale: torch.Tensor) -> Block:
    rows, columns = (max(1, size // max(1, n)) for size, n in zip(float8.shape, scale.shape, strict=True))
    return rows, columns


def _like(left: torch.Tensor, _: Any, right: torch.Tensor, *rest: Any) -> torch.Tensor:
    return left.new_empty((left.size(0), right.size(0)), dtype=rest[-1])


mm_blocks = define(
    "mm_blocks(Tensor left, Tensor left_scale, Tensor right, Tensor right_scale, ScalarType dtype) -> Tensor",
    _run,
    _like,
)
"""`left @ right.T`, each multiplied by the scales of its blocks.

Shapes: (M, K) and (N, K) in 8 bits, rows next to each other in memory; scales (blocks of rows, blocks of
columns) fp32 -> (M, N) of `dtype`.
"""
