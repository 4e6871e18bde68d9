"""Float8Tensor: a matrix in 8 bits with its scales; it stands for `float8 * scale`.

There is one scale for the tensor, or one for each block. Products with one scale each are computed by
`torch._scaled_mm`, on a CPU by an operator that dequantises; products with blocks by
`float8_blocks.mm_blocks`.

Rounding is to nearest, ties to even, and saturates at the largest number of the format, so that a scale that
is too small (as delayed scaling's may be) costs accuracy but makes no NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.float8_blocks import ALIGNMENT as ALIGNMENT
from aotdist.subclasses.float8_blocks import Block as Block
from aotdist.subclasses.float8_blocks import flat, in_blocks, mm_blocks, multiplied_out
from aotdist.subclasses.own_operators import define
from aotdist.torch_seam.dtensor import local_part, local_tensor, make_dtensor, retyped_spec

aten = torch.ops.aten

E4M3 = torch.float8_e4m3fn
"""4 bits of exponent, 3 of mantissa, largest number 448: for activations and weights."""
E5M2 = torch.float8_e5m2
"""5 bits of exponent, 2 of mantissa, largest number 57,344: for gradients, whose range is wider."""


class Float8Tensor(torch.Tensor):
    """A matrix in 8 bits that stands for one of higher precision.

    A product of two has the dtype that the first stands for. There is no other arithmetic: dequantise first.

    Args:
        float8: (rows, columns), float8_e4m3fn or float8_e5m2; with `block`, filled up to whole blocks with
            zeros, which add nothing to a product.
        scale: fp32 factor of `float8`; a scalar, or with `block` one number for each block: (ceil(rows /
            block rows), ceil(columns / block columns)).
        dtype: that it stands for.
        block: rows and columns that share a scale; None for one scale.
        size: (rows, columns) with `block`, if `float8` is filled up.
    """

    float8: torch.Tensor
    scale: torch.Tensor
    block: Block | None

    @staticmethod
    def __new__(
        cls: type[Float8Tensor],
        float8: torch.Tensor,
        scale: torch.Tensor,
        dtype: torch.dtype,
        block: Block | None = None,
        size: torch.Size | None = None,
    ) -> Float8Tensor:
        """A wrapper with the strides of `float8`, or with `size` of its part without padding."""
        stride = float8.stride()
        if size is not None:
            stride = (size[1], 1) if float8.is_contiguous() else (1, size[0])
        tensor: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, size or float8.size(), strides=stride, dtype=dtype, device=float8.device
        )
        tensor.float8, tensor.scale, tensor.block = float8, scale, block
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Float8Tensor({self.float8!r}, scale={self.scale!r}, dtype={self.dtype}, block={self.block})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The names of the plain tensors, and the context."""
        return ["float8", "scale"], (self.dtype, self.block)

    @staticmethod
    def __tensor_unflatten__(
        inner: Mapping[str, torch.Tensor], context: Any, size: torch.Size, stride: tuple[int, ...]
    ) -> Float8Tensor:
        """The inverse of `__tensor_flatten__`."""
        dtype, block = context
        return Float8Tensor(inner["float8"], inner["scale"], dtype, block, None if block is None else size)

    def dequantise(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The matrix that this stands for, computed in fp32 and rounded to `dtype` (default: its own)."""
        if self.block is None:
            return (self.float8.float() * self.scale).to(dtype or self.dtype)
        rows, columns = self.shape
        return multiplied_out(self.float8, self.scale, self.block)[:rows, :columns].to(dtype or self.dtype)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs products, and what autograd and FSDP2 call.

        Raises:
            UnsupportedProgram: the operator is another.
        """
        handler = _HANDLERS.get(func)
        if handler is None:
            raise UnsupportedProgram(
                f"`{func}` was called on a Float8Tensor, which only knows products with its like",
                fix="call `.dequantise()` on it first",
            )
        return handler(*args, **(kwargs or {}))


def scale_for(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The scale that maps `amax` to the largest number of `dtype`; 1 where `amax` is 0.

    Shapes: any -> the same, fp32.
    """
    return torch.where(amax > 0, amax.float() / torch.finfo(dtype).max, 1.0)


def quantise(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, block: Block | None = None
) -> torch.Tensor:
    """`x / scale`, rounded to 8 bits and saturating; arithmetic is fp32.

    Shapes: (rows, columns) and a scalar -> (rows, columns). With a scale for each block, what is returned is
    filled up to whole blocks: Inductor (torch 2.13, AVX-512) reads and writes wrong bytes where 8-bit floats
    are cut off, and kernels want whole blocks anyway.
    """
    largest = torch.finfo(dtype).max
    if block is None:
        return (x.float() / scale).clamp(-largest, largest).to(dtype)
    blocks = in_blocks(x.float(), block) / scale[:, None, :, None]
    return flat(blocks.clamp(-largest, largest)).to(dtype)


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in `x` as a plain fp32 scalar; for a DTensor, over all its shards.

    Args:
        x: of any shape; a DTensor is reduced over the mesh axes that it is sharded over, and must not be a
            partial sum, see `settled`. A rank may hold an empty part.
    """
    local = local_part(x)
    amax = local.detach().abs().amax().float() if local.numel() else torch.zeros((), device=local.device)
    if not isinstance(x, DTensor):
        return amax
    parts = [placement if placement.is_replicate() else Partial("max") for placement in x.placements]
    return DTensor.from_local(amax, x.device_mesh, parts, run_check=False).full_tensor()


def cast(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, *, stands_for: torch.dtype | None = None
) -> torch.Tensor:
    """`x` in 8 bits with one scale: a Float8Tensor, or a DTensor around one.

    Args:
        x: a matrix; a DTensor must not be a partial sum, see `settled`.
        scale: a plain scalar, the same on all ranks.
        dtype: of 8 bits.
        stands_for: the dtype of products with it, by default that of `x`.
    """
    wide = stands_for or x.dtype
    return on_local(lambda part: Float8Tensor(quantise(part, scale, dtype), scale, wide), x)


def on_local(fn: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply `fn` to this rank's part of `x`; `fn` keeps sizes and may change the dtype."""
    if not isinstance(x, DTensor):
        return fn(x)
    local = fn(local_tensor(x))
    return make_dtensor(local, retyped_spec(x, local.dtype))


def settled(x: torch.Tensor) -> torch.Tensor:
    """`x` with partial sums reduced, since sums of rounded parts are not rounded sums."""
    if not isinstance(x, DTensor) or not any(placement.is_partial() for placement in x.placements):
        return x
    whole = [Replicate() if placement.is_partial() else placement for placement in x.placements]
    return x.redistribute(placements=whole)


def block_amax(x: torch.Tensor, block: Block) -> torch.Tensor:
    """The largest magnitude in each block.

    Shapes: (rows, columns) -> (ceil(rows / block rows), ceil(columns / block columns)).
    """
    return in_blocks(x.detach().abs(), block).amax((1, 3))


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not isinstance(a, Float8Tensor) or not isinstance(b, Float8Tensor):
        raise UnsupportedProgram(
            "a Float8Tensor is multiplied by a plain tensor", fix="dequantise it, or cast the other one too"
        )
    if (a.block is None) != (b.block is None):
        raise UnsupportedProgram(
            "a Float8Tensor with blocks is multiplied by one with a single scale", fix="cast both alike"
        )
    if a.block is not None:
        left, right = a.float8.contiguous(), b.float8.t().contiguous()
        filled = mm_blocks(left, a.scale, right, b.scale.t(), a.dtype)
        return filled[: a.size(0), : b.size(1)].contiguous()
    left, right = _aligned(a.float8), _aligned(b.float8.t())
    # Hopper's tensor cores add with fewer bits than fp32. That does for a forward; a gradient, which is e5m2,
    # is added up exactly, as in torchao.
    is_forward = a.float8.dtype == b.float8.dtype == E4M3
    product = _mm_scaled if left.device.type == "cpu" else _by_kernel
    return product(left, right.t(), a.scale, b.scale, a.dtype, is_forward)


def _by_kernel(left: torch.Tensor, right: torch.Tensor, *scales_dtype_and_fast: Any) -> torch.Tensor:
    *scales, dtype, fast = scales_dtype_and_fast
    return aten._scaled_mm.default(left, right, *scales, out_dtype=dtype, use_fast_accum=fast)


def _run_scaled(left: torch.Tensor, right: torch.Tensor, *others: Any) -> torch.Tensor:
    """`_scaled_mm`, on a CPU multiplied out in fp32, as PyTorch does on those without matrix units.

    On those with units for 8-bit integers and none for floats it asks oneDNN, whose reference answers: 1.2 s
    for 256 x 128 x 256 in e4m3 on a Xeon of model 207, where this takes 1 ms (torch 2.13, one thread).
    """
    if left.device.type != "cpu":
        return _by_kernel(left, right, *others)
    left_scale, right_scale, dtype, _ = others
    return torch.mm(left.float() * left_scale, right.float() * right_scale).to(dtype)


_mm_scaled = define(
    "mm_scaled(Tensor left, Tensor right, Tensor left_scale, Tensor right_scale, ScalarType dtype, bool fast)"
    " -> Tensor",
    _run_scaled,
    _by_kernel,
)


def _aligned(matrix: torch.Tensor) -> torch.Tensor:
    """Contiguous rows, padded with zeros to the alignment of `_scaled_mm`.

    Only the product for a weight's gradient needs the padding, for an odd number of tokens.
    """
    missing = -matrix.size(1) % ALIGNMENT
    if not missing:
        return matrix.contiguous()
    return torch.cat([matrix, matrix.new_zeros(matrix.size(0), missing)], 1)


def _transposed(x: Float8Tensor) -> Float8Tensor:
    if x.block is None:
        return Float8Tensor(x.float8.t(), x.scale, x.dtype)
    rows, columns = x.block
    size = torch.Size((x.size(1), x.size(0)))
    return Float8Tensor(x.float8.t(), x.scale.t(), x.dtype, (columns, rows), size)


def _detached(x: Float8Tensor) -> Float8Tensor:
    return Float8Tensor(x.float8.detach(), x.scale.detach(), x.dtype, x.block, _size_in_blocks(x))


def _cloned(x: Float8Tensor, *, memory_format: torch.memory_format | None = None) -> Float8Tensor:
    copy = x.float8.clone(memory_format=memory_format or torch.preserve_format)
    return Float8Tensor(copy, x.scale.clone(), x.dtype, x.block, _size_in_blocks(x))


def _size_in_blocks(x: Float8Tensor) -> torch.Size | None:
    return None if x.block is None else x.size()


def _strided(
    x: Float8Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Float8Tensor:
    """FSDP2 calls it to cut the padding off a gathered weight."""
    if x.block is not None:
        raise UnsupportedProgram("a Float8Tensor with blocks has no strided views", fix="dequantise it first")
    return Float8Tensor(x.float8.as_strided(size, stride, storage_offset), x.scale, x.dtype)


_HANDLERS: Mapping[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.t.default: _transposed,
    aten.as_strided.default: _strided,
    aten.detach.default: _detached,
    aten.clone.default: _cloned,
}
