"""2:4 masks keep what they should, and packing loses nothing of what they keep."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.sparse import _semi_structured_conversions as torch_conversions

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.sparse24_packing import (
    DTYPES,
    MaskKind,
    bytes_of_cutlass_words,
    compress,
    cutlass_words,
    decode,
    encode,
    magnitude_mask,
    require_packable,
    unpack,
)

CUTLASS_SIZES = {
    torch.bfloat16: (32, 64),
    torch.float16: (64, 128),
}
"""Sizes that fill CUTLASS's tiles."""


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    """Few different values, so many ties; zeros of both signs, infinities and NaN among them."""
    rows, columns = 8 * draw(st.integers(1, 4)), 8 * draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(DTYPES))
    values = [0.0, 1.0, -1.0, 2.0, -3.0, 100.0, -128.0, -0.0, 0.5, math.inf, -math.inf, math.nan]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    places = torch.randint(len(values), (rows, columns), generator=generator)
    return torch.tensor(values, dtype=dtype)[places]


def groups(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.unflatten(-1, (-1, 4))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


@given(matrices())
def test_a_row_mask_keeps_the_two_that_a_stable_sort_puts_first(dense: torch.Tensor) -> None:
    magnitudes = groups(dense).double().abs()
    first_two = magnitudes.sort(dim=-1, descending=True, stable=True).indices[..., :2]
    expected = torch.zeros_like(magnitudes, dtype=torch.bool).scatter(-1, first_two, True).flatten(-2)
    assert torch.equal(magnitude_mask(dense), expected)


@given(matrices())
def test_a_transposable_mask_is_two_of_four_both_ways(dense: torch.Tensor) -> None:
    mask = magnitude_mask(dense, "transposable")
    assert groups(mask).sum(-1).eq(2).all()
    assert groups(mask.t()).sum(-1).eq(2).all()


def tile_masks() -> list[torch.Tensor]:
    """Every 4x4 mask with two in each row and column, found without the code under test."""
    ones = (torch.tensor([[k in kept for k in range(16)]]).view(4, 4) for kept in combinations(range(16), 8))
    return [mask for mask in ones if mask.sum(0).eq(2).all() and mask.sum(1).eq(2).all()]


def test_a_transposable_mask_keeps_the_largest_sum() -> None:
    masks = tile_masks()
    assert len(masks) == 90
    tile = torch.randn(8, 8)
    mask = magnitude_mask(tile, "transposable")
    for rows in (slice(0, 4), slice(4, 8)):
        best = max((tile[rows, :4].abs() * m).sum().item() for m in masks)
        assert (tile[rows, :4].abs() * mask[rows, :4]).sum().item() == pytest.approx(best, abs=1e-6)


def test_nan_is_kept_by_a_transposable_mask() -> None:
    tile = torch.full((8, 8), torch.finfo(torch.float32).max)
    tile[5, 2] = math.nan
    tile[:5] = 0
    assert magnitude_mask(tile, "transposable")[5, 2]


@given(matrices(), st.sampled_from(["row", "transposable"]))
def test_packing_and_unpacking_gives_what_the_mask_keeps(dense: torch.Tensor, kind: MaskKind) -> None:
    mask = magnitude_mask(dense, kind)
    meta = encode(mask)
    packed = compress(dense, meta)
    assert torch.equal(decode(meta), mask)
    assert same_bits(packed, dense[mask].view(dense.size(0), -1))
    assert same_bits(unpack(packed, meta), torch.where(mask, dense, torch.zeros_like(dense)))
    assert torch.equal(compress(unpack(packed, meta).nan_to_num(), meta), packed.nan_to_num())


@given(matrices())
def test_rows_are_packed_one_by_one(dense: torch.Tensor) -> None:
    """So a shard of rows is packed as it would be inside the whole matrix."""
    whole = encode(magnitude_mask(dense))
    assert torch.equal(encode(magnitude_mask(dense[4:])), whole[4:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_stored_bytes(dtype: torch.dtype) -> None:
    dense = torch.randn(32, 64, dtype=dtype)
    meta = encode(magnitude_mask(dense))
    packed = compress(dense, meta)
    share = {2: 9 / 16, 4: 17 / 32}[dtype.itemsize]
    assert packed.nbytes + meta.nbytes == share * dense.nbytes


@pytest.mark.parametrize("dtype", CUTLASS_SIZES)
def test_the_layout_is_that_of_cutlass(dtype: torch.dtype) -> None:
    dense = (torch.randn(CUTLASS_SIZES[dtype]) * 40).to(dtype)
    dense = torch.where(dense == 0, 1, dense)  # PyTorch drops zeros, whatever their place
    meta = encode(magnitude_mask(dense))
    packed, words = compress(dense, meta), cutlass_words(meta)
    pruned = unpack(packed, meta)
    theirs = torch_conversions.sparse_semi_structured_from_dense_cutlass(pruned)
    assert all(torch.equal(a, b) for a, b in zip((packed, words), theirs, strict=True))
    assert torch.equal(torch_conversions.sparse_semi_structured_to_dense_cutlass(packed, words), pruned)
    assert torch.equal(bytes_of_cutlass_words(words), meta)


@pytest.mark.parametrize("rows, columns", [(16, 64), (32, 32)])
def test_what_does_not_fill_cutlass_tiles_is_refused(rows: int, columns: int) -> None:
    with pytest.raises(UnsupportedProgram, match="no layout"):
        cutlass_words(torch.zeros(rows, columns // 8, dtype=torch.uint8))


REFUSED = {
    "complex": (lambda: torch.zeros(8, 8, dtype=torch.complex64), "row", "complex64"),
    "integers": (lambda: torch.zeros(8, 8, dtype=torch.int8), "row", "int8"),
    "one dimension": (lambda: torch.zeros(8), "row", "1 dimensions"),
    "three dimensions": (lambda: torch.zeros(2, 8, 8), "row", "flatten"),
    "half a group": (lambda: torch.zeros(8, 10), "row", "rows of 10"),
    "half a byte": (lambda: torch.zeros(8, 12), "row", "multiple of 8"),
    "transposed, half a group": (lambda: torch.zeros(6, 8), "transposable", "columns of 6"),
    "strides": (lambda: torch.zeros(8, 8).t(), "row", "contiguous"),
    "every other column": (lambda: torch.zeros(8, 16)[:, ::2], "row", "contiguous"),
}


@pytest.mark.parametrize("make, kind, says", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_packed_is_refused(make, kind: MaskKind, says: str) -> None:
    with pytest.raises(UnsupportedProgram, match=says) as raised:
        require_packable(make(), kind)
    assert raised.value.fix
