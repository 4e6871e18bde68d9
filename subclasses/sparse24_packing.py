"""2:4 sparsity as bits: which two of every four elements are kept, and how they are stored.

A *group* is four neighbours of a row; a *mask* says which two of them are kept. Stored are the kept values,
*packed* side by side, and their places in the group, two bits each, as *metadata*::

    row       [ .  7  . -3 |  5  4  .  . ]
    packed    [ 7 -3  5  4 ]
    metadata  places 1, 3 | 0, 1 = 0b1101 | 0b0100 = one byte, the first group in its low half

Two bytes, read as one little-endian word, are the metadata operand of `mma.sp` for 16-bit elements
(PTX ISA, "Sparse matrix storage"). CUTLASS shuffles these words so that a warp loads its share at once:
`cutlass_words` and `bytes_of_cutlass_words` go there and back.

Everything here is made of pointwise operators, so it can be captured, fused and run on any device, and the
same numbers give the same mask everywhere. Shapes: R rows, C columns.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import Literal, TypeAlias

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.tensors import cutlass_word_places

MaskKind: TypeAlias = Literal["row", "transposable"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that can be packed."""

GROUP = 4
COLUMNS_PER_BYTE = 8
"""Two groups share a byte of metadata, so rows are whole bytes."""

_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}

_PAIRS = tuple(combinations(range(GROUP), 2))
_TILES = tuple(
    rows
    for rows in product(range(len(_PAIRS)), repeat=GROUP)
    if all(sum(column in _PAIRS[row] for row in rows) == 2 for column in range(GROUP))
)
"""The 90 masks of a 4x4 tile with two in each row and in each column: for each row, which pair."""


def refusal(dense: torch.Tensor, mask: MaskKind = "row") -> tuple[str, str] | None:
    """Why a tensor cannot be packed, and what to do about it; None if it can."""
    if dense.dtype not in DTYPES:
        return f"is {dense.dtype}", f"convert it to one of {', '.join(map(str, DTYPES))}"
    if dense.dim() != 2:
        return f"has {dense.dim()} dimensions", "reshape it to two: `tensor.flatten(0, -2)`"
    rows, columns = dense.shape
    if columns % COLUMNS_PER_BYTE:
        return (
            f"has rows of {columns} elements, which are no whole bytes of metadata",
            f"pad them to a multiple of {COLUMNS_PER_BYTE}, or leave this tensor dense",
        )
    if mask == "transposable" and rows % COLUMNS_PER_BYTE:
        return (
            f"has columns of {rows} elements, which are no whole bytes of metadata once it is transposed",
            f"pad them to a multiple of {COLUMNS_PER_BYTE}, or choose mask='row'",
        )
    return None


def require_packable(dense: torch.Tensor, mask: MaskKind = "row") -> None:
    """Raise for a tensor that cannot be packed.

    Raises:
        UnsupportedProgram: says why, and what would help.
    """
    reasons = refusal(dense, mask)
    if reasons is None and not dense.is_contiguous():
        reasons = f"has strides {dense.stride()}, and groups must be neighbours", "call `.contiguous()` first"
    if reasons is not None:
        what, fix = reasons
        raise UnsupportedProgram(f"a tensor of size {list(dense.shape)} {what}: no 2:4 packing", fix=fix)


def magnitude_mask(dense: torch.Tensor, mask: MaskKind = "row") -> torch.Tensor:
    """The 2:4 mask that keeps the largest magnitudes.

    `row` keeps the two largest magnitudes of every group, the first ones if they are equal. NaN counts as
    larger than infinity, so that it stays visible. `transposable` keeps two in each row and in each column of
    every 4x4 tile, so that the transposed matrix is 2:4 too: of the 90 such masks, the one with the largest
    sum of magnitudes.

    Shapes: (R, C) -> (R, C) bool. With `transposable`, scoring takes 22.5 bytes an element meanwhile.
    Source of the exhaustive choice: Hu et al., "Accelerating Transformer Pre-training with 2:4 Sparsity",
    arXiv:2404.01847, section 4.
    """
    return _row_mask(dense) if mask == "row" else _transposable_mask(dense)


def _row_mask(dense: torch.Tensor) -> torch.Tensor:
    return torch.stack(two_largest(*_groups(magnitude(dense))), -1).flatten(-2)


def two_largest(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Whether each is one of the two largest, elementwise; of equal ones the first are."""
    ab, ac, ad, bc, bd, cd = a >= b, a >= c, a >= d, b >= c, b >= d, c >= d
    return (
        _two_of_three(ab, ac, ad),
        _two_of_three(~ab, bc, bd),
        _two_of_three(~ac, ~bc, cd),
        _two_of_three(~ad, ~bd, ~cd),
    )


def magnitude(dense: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the magnitudes: the bits of the floats without the sign."""
    integers = bits(dense)
    return integers & torch.iinfo(integers.dtype).max


def bits(dense: torch.Tensor) -> torch.Tensor:
    """The same bits as integers."""
    return dense.view(_INTEGER_OF_SIZE[dense.dtype.itemsize])


def _two_of_three(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return (x & y) | (z & (x | y))


def _transposable_mask(dense: torch.Tensor) -> torch.Tensor:
    tiles = _scores(dense).unflatten(0, (-1, GROUP)).unflatten(-1, (-1, GROUP)).transpose(1, 2)
    columns = tiles.unbind(-1)
    pairs = torch.stack([columns[i] + columns[j] for i, j in _PAIRS], -1)
    choices = torch.tensor(_TILES, device=dense.device)
    # Added in this order and not by a matrix product, whose order, and so whose ties, may vary with the size.
    total = pairs[..., 0, :].index_select(-1, choices[:, 0])
    for row in range(1, GROUP):
        total = total + pairs[..., row, :].index_select(-1, choices[:, row])
    pair_of_row = choices[total.argmax(-1)]
    masks_of_pairs = torch.tensor(
        [[place in pair for place in range(GROUP)] for pair in _PAIRS], device=dense.device
    )
    return masks_of_pairs[pair_of_row].transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _scores(dense: torch.Tensor) -> torch.Tensor:
    """Magnitudes, clamped so that eight can be added without overflow; a NaN outweighs any other seven."""
    wide = torch.float64 if dense.dtype == torch.float64 else torch.float32
    largest = torch.finfo(wide).max / 8
    return dense.to(wide).abs().clamp(max=largest / 16).nan_to_num(nan=largest)


def encode(mask: torch.Tensor) -> torch.Tensor:
    """The metadata of a 2:4 mask.

    Shapes: (R, C) bool, two of every group -> (R, C / 8) uint8.
    """
    k0, k1, k2, k3 = _groups(mask)
    first = (~k0).to(torch.uint8) + (~(k0 | k1)).to(torch.uint8)
    last = 1 + (k2 | k3).to(torch.uint8) + k3.to(torch.uint8)
    low, high = (first | (last << 2)).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def decode(meta: torch.Tensor) -> torch.Tensor:
    """The mask of metadata. Shapes: (R, C / 8) uint8 -> (R, C) bool."""
    first, last = (place.unsqueeze(-1) for place in _places(meta))
    at = torch.arange(GROUP, dtype=torch.uint8, device=meta.device)
    return ((first == at) | (last == at)).flatten(-2)


def compress(dense: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """The kept values. Shapes: (R, C), (R, C / 8) uint8 -> (R, C / 2)."""
    first, last = _places(meta)
    d0, d1, d2, d3 = _groups(dense)
    kept = (
        torch.where(first == 0, d0, torch.where(first == 1, d1, d2)),
        torch.where(last == 3, d3, torch.where(last == 2, d2, d1)),
    )
    return torch.stack(kept, -1).flatten(-2)


def unpack(packed: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """The dense matrix, zeros where nothing was kept. Shapes: (R, C / 2), (R, C / 8) uint8 -> (R, C)."""
    first, last = (place.unsqueeze(-1) for place in _places(meta))
    left, right = (value.unsqueeze(-1) for value in packed.unflatten(-1, (-1, 2)).unbind(-1))
    at = torch.arange(GROUP, dtype=torch.uint8, device=meta.device)
    return torch.where(first == at, left, torch.where(last == at, right, 0)).flatten(-2)


def _groups(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.unflatten(-1, (-1, GROUP)).unbind(-1)


def _places(meta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The places of both kept elements in their group. Shapes: (R, C / 8) uint8 -> twice (R, C / 4)."""
    halves = torch.stack((meta & 0b1111, meta >> 4), -1).flatten(-2)
    return halves & 0b11, halves >> 2


def cutlass_words(meta: torch.Tensor) -> torch.Tensor:
    """Metadata as CUTLASS reads it, for 16-bit floats. Shapes: (R, C / 8) uint8 -> (R, C / 16) int16.

    Raises:
        UnsupportedProgram: the size does not fill CUTLASS's words and tiles.
    """
    if meta.size(0) % 32 or meta.size(1) % 8:
        raise UnsupportedProgram(
            f"CUTLASS has no layout for metadata of size {list(meta.shape)}",
            fix="16-bit floats want rows in 32s and columns in 64s",
        )
    words = meta.view(torch.int16)
    shuffled = torch.empty_like(words).view(-1)
    return shuffled.scatter(0, cutlass_word_places(words), words.view(-1)).view_as(words)


def bytes_of_cutlass_words(words: torch.Tensor) -> torch.Tensor:
    """The inverse of `cutlass_words`."""
    return words.reshape(-1).gather(0, cutlass_word_places(words)).view_as(words).view(torch.uint8)


# Choosing and packing by slots, for compilers that fuse: one kernel reads a matrix and writes values and
# metadata.
#
# A byte of metadata stands for eight elements, of which four are kept, in four *slots*. The place of a slot's
# element in its group takes two bits, so the byte is the sum of the four places, each times a power of four.
# Here values and places are computed for each slot, and bytes are sums over four slots, so that all of it
# fits into one kernel with a reduction over rows, as a softmax does. The functions above, by groups, are
# fewer operations when each runs by itself. Both give the same bits. Values are moved as integers.
#
# Shapes: R rows, C columns of the matrix; B = C / 8 bytes of metadata in a row, of 2 groups of 2 slots.


def choose_by_slots(dense: torch.Tensor) -> torch.Tensor:
    """`encode(magnitude_mask(dense))`. Shapes: (R, C) -> (R, B) uint8."""
    k0, k1, k2, k3 = two_largest(*_elements(magnitude(dense)))
    first = (~k0).to(torch.int32) + (~(k0 | k1)).to(torch.int32)
    last = 1 + (k2 | k3).to(torch.int32) + k3.to(torch.int32)
    in_first_group, is_first = _halves(dense)
    half = torch.where(is_first, first, torch.bitwise_left_shift(last, 2))
    byte = torch.where(in_first_group, half, torch.bitwise_left_shift(half, 4))
    return byte.sum((2, 3), dtype=torch.int32).to(torch.uint8)


def compress_by_slots(dense: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """`compress(dense, meta)`. Shapes: (R, C), (R, B) uint8 -> (R, C / 2)."""
    byte = meta.to(torch.int32)[:, :, None, None]
    in_first_group, is_first = _halves(dense)
    half = torch.where(in_first_group, byte & 0b1111, torch.bitwise_right_shift(byte, 4))
    place = torch.where(is_first, half & 0b11, torch.bitwise_right_shift(half, 2))
    d0, d1, d2, d3 = _elements(bits(dense))
    kept = torch.where(place == 0, d0, torch.where(place == 1, d1, torch.where(place == 2, d2, d3)))
    return kept.flatten(1).view(dense.dtype)


def _elements(dense: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The four elements of each slot's group. Shapes: (R, C) -> four times (R, B, 2, 2)."""
    groups = dense.unflatten(1, (-1, 2, 1, GROUP)).expand(-1, -1, -1, 2, -1)
    return groups.unbind(-1)


def _halves(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which slots are in the first group of a byte, and which come first in theirs. Shapes: (2, 1), (2,)."""
    is_first = torch.arange(2, device=dense.device) == 0
    return is_first[:, None], is_first
