"""Choosing and packing 2:4 by slots, for compilers that fuse: one kernel reads a matrix and writes both.

A byte of metadata stands for eight elements, of which four are kept, in four *slots*. A slot's place in its
group takes two bits, so a byte is the sum of its slots' places, each times a power of four; and what a slot
holds follows from its place and its group. Here both are computed at the slots, bytes by a sum over four of
them, so that they fit into one kernel that reduces rows, as a softmax is one. `sparse24_packing` computes
them by groups: fewer operations where each is run by itself. Both give the same bits.

Values are moved as integers, since nothing is computed with them.

Shapes: R rows, C columns of the matrix; B = C / 8 bytes of metadata in a row, of 2 groups of 2 slots.
"""

from __future__ import annotations

import torch

from aotdist.subclasses.sparse24_packing import GROUP, bits, magnitude, two_largest


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
    """Those of each slot's group, first to last. Shapes: (R, C) -> four times (R, B, 2, 2)."""
    groups = dense.unflatten(1, (-1, 2, 1, GROUP)).expand(-1, -1, -1, 2, -1)
    return groups.unbind(-1)


def _halves(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which slots are in the first group of a byte, and which come first in theirs. Shapes: (2, 1), (2,)."""
    is_first = torch.arange(2, device=dense.device) == 0
    return is_first[:, None], is_first
