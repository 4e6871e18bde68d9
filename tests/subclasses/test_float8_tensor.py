"""Float8Tensor: its rounding, its products, and its way through a compiled function."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.float8_linear import SQUARE, TILE
from aotdist.subclasses.float8_tensor import (
    E4M3,
    E5M2,
    Block,
    Float8Tensor,
    amax_of,
    block_amax,
    cast,
    quantise,
    scale_for,
)
from tests.subclasses.fsdp_models import same_bits

ONE = torch.tensor(1.0)
FORMATS = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}
"""Bits of mantissa, least normal exponent, largest number; arXiv:2209.05433, table 1."""


def rounded(value: float, dtype: torch.dtype) -> float:
    """To the nearest number of the format, ties to even, saturating: in Python's fp64."""
    mantissa, least, largest = FORMATS[dtype]
    exponent = max(torch.frexp(torch.tensor(abs(value), dtype=torch.float64)).exponent.item() - 1, least)
    unit = 2.0 ** (exponent - mantissa)
    return max(-largest, min(largest, round(value / unit) * unit))


@pytest.mark.parametrize("dtype", FORMATS)
@given(value=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_rounding(dtype: torch.dtype, value: float) -> None:
    got = quantise(torch.tensor([[value]]), ONE, dtype).double().item()
    assert got == rounded(value, dtype)


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_number_of_the_format_stays(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    numbers = numbers[numbers.float().isfinite()].reshape(1, -1)
    assert same_bits(quantise(numbers.float(), ONE, dtype), numbers)
    assert quantise(torch.tensor([[float("nan")]]), ONE, dtype).isnan().all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_scales(dtype: torch.dtype) -> None:
    x = torch.randn(16, 48) * 1e-3
    x8 = cast(x, scale_for(amax_of(x), dtype), dtype)
    assert x8.float8.float().abs().max() == torch.finfo(dtype).max
    assert torch.allclose(x8.dequantise(), x, rtol=0.13, atol=1e-7)
    assert scale_for(torch.zeros(()), dtype) == 1


def tensors(left: torch.dtype, right: torch.dtype, wide: torch.dtype) -> tuple[Float8Tensor, Float8Tensor]:
    a, b = torch.randn(32, 64).to(wide) * 3, torch.randn(48, 64).to(wide)
    return cast(a, scale_for(amax_of(a), left), left), cast(b, scale_for(amax_of(b), right), right)


def tolerance(wide: torch.dtype) -> float:
    """One rounding to `wide`, after a sum of 64 in fp32."""
    return torch.finfo(wide).eps + 8 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("left", "right"), [(E4M3, E4M3), (E5M2, E4M3)])
def test_products(left: torch.dtype, right: torch.dtype, wide: torch.dtype) -> None:
    """Equal to the product in fp32 of what they stand for, but for the order of sums."""
    a, b = tensors(left, right, wide)
    exact = a.dequantise(torch.float64) @ b.dequantise(torch.float64).t()
    product = torch.mm(a, b.t())
    assert type(product) is torch.Tensor and product.dtype == wide
    assert (product.double() - exact).abs().max() <= exact.abs().max() * tolerance(wide)


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16])
def test_what_is_emulated_rounds_as_the_kernel_does(wide: torch.dtype) -> None:
    """One block of one scale: the product that is multiplied out here is `torch._scaled_mm`'s."""
    a, b = tensors(E4M3, E4M3, wide)
    blocks = [Float8Tensor(t.float8, t.scale.reshape(1, 1), t.dtype, (64, 64)) for t in (a, b)]
    kernel, emulated = torch.mm(a, b.t()), torch.mm(blocks[0], blocks[1].t())
    assert (kernel - emulated).abs().max() <= kernel.abs().max() * tolerance(wide)


@pytest.mark.parametrize("size", [(256, 384), (1, 128), (130, 100), (3, 300)])
@pytest.mark.parametrize("block", [TILE, SQUARE])
def test_blocks(block: Block, size: tuple[int, int]) -> None:
    """Each block by itself, the last ones filled up with zeros."""
    x = torch.randn(size)
    scale = scale_for(block_amax(x, block), E4M3)
    x8 = Float8Tensor(quantise(x, scale, E4M3, block), scale, x.dtype, block, x.size())
    cut = x8.float8[: size[0], : size[1]]
    assert cut.float().count_nonzero() == x8.float8.float().count_nonzero()
    for top in range(0, size[0], block[0]):
        for left in range(0, size[1], block[1]):
            here = slice(top, top + block[0]), slice(left, left + block[1])
            alone = cast(x[here], scale_for(amax_of(x[here]), E4M3), E4M3)
            assert same_bits(cut[here], alone.float8)
            assert same_bits(x8.dequantise()[here], alone.dequantise())
    assert torch.equal(x8.t().dequantise(), x8.dequantise().t())


def test_through_a_compiled_function() -> None:
    """In and out as what it is, none inside."""

    def fn(x8: Float8Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w8 = cast(w, scale_for(amax_of(w), E4M3), E4M3)
        return torch.mm(x8, w8.t()), w8.t()

    x8, w = tensors(E4M3, E4M3, torch.float32)[0], torch.randn(48, 64)
    compiled = aotdist.compile(fn, backend="fx")
    for got, want in zip(compiled(x8, w), fn(x8, w), strict=True):
        assert type(got) is type(want) and got.stride() == want.stride()
        if isinstance(got, Float8Tensor):
            assert same_bits(got.float8, want.float8) and same_bits(got.scale, want.scale)
        else:
            assert same_bits(got, want)


def test_other_arithmetic_is_refused() -> None:
    x8, w8 = tensors(E4M3, E4M3, torch.float32)
    with pytest.raises(UnsupportedProgram, match="aten.add.*\n.*dequantise"):
        x8 + 1
    with pytest.raises(UnsupportedProgram, match="multiplied by a plain tensor"):
        torch.mm(x8, torch.randn(64, 3))
    in_blocks = Float8Tensor(w8.float8, w8.scale.reshape(1, 1), w8.dtype, w8.float8.shape, w8.size())
    with pytest.raises(UnsupportedProgram, match="with blocks is multiplied by one with a single scale"):
        torch.mm(x8, in_blocks.t())
    assert "scale=" in repr(w8)
