"""Which tensors share memory: decided exactly, to the byte.

Tensors of one storage need not overlap: the rows of a buffer, or two column blocks of a matrix, do not. Two
strided tensors overlap if a bounded linear equation has a solution, which is searched for dimension by
dimension; nested strides, which views have, leave one or two values to try in each.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from aotdist.torch_seam.tensors import storage_id

_Steps: TypeAlias = tuple[tuple[int, int], ...]
"""Stride in bytes and highest index of each dimension; the bytes of an element are the last dimension."""


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether some byte belongs to both tensors."""
    if storage_id(a) != storage_id(b) or a.numel() == 0 or b.numel() == 0:
        return False
    return _meet(start_of(b) - start_of(a), _steps(a), _steps(b))


def covers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether `a` is known to cover every byte of `b`: `a` has no gaps, or both have the same layout."""
    if storage_id(a) != storage_id(b):
        return False
    if (
        a.size() == b.size()
        and a.stride() == b.stride()
        and a.dtype == b.dtype
        and start_of(a) == start_of(b)
    ):
        return True
    ends = [start_of(tensor) + extent(tensor) * tensor.element_size() for tensor in (a, b)]
    return not _has_gaps(a) and start_of(a) <= start_of(b) and ends[1] <= ends[0]


def shows(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> bool:
    """Whether a tensor is known to cover what `as_strided` would show; see `covers`."""
    start = int(tensor.storage_offset())
    offset = start if offset is None else offset
    if 0 in size or (
        tensor.size() == torch.Size(size) and tensor.stride() == tuple(stride) and offset == start
    ):
        return True
    end = offset + extent_of(size, stride)
    return not _has_gaps(tensor) and start <= offset and end <= start + tensor.numel()


def may_repeat(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may share memory, as its strides are not nested."""
    last = 0
    for dim in reversed(by_stride(tensor.size(), tensor.stride())):
        if tensor.size(dim) > 1:
            if tensor.stride(dim) <= last:
                return True
            last += (tensor.size(dim) - 1) * tensor.stride(dim)
    return False


def _has_gaps(tensor: torch.Tensor) -> bool:
    expected = 1
    for dim in reversed(by_stride(tensor.size(), tensor.stride())):
        if tensor.size(dim) > 1 and tensor.stride(dim) != expected:
            return True
        expected *= tensor.size(dim)
    return False


def overlapping_groups(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Positions of tensors that overlap, directly or through others, in groups of at least two."""
    by_storage: dict[int, list[int]] = {}
    for position, tensor in enumerate(tensors):
        by_storage.setdefault(storage_id(tensor), []).append(position)
    groups: list[list[int]] = []
    for positions in by_storage.values():
        groups += _connected(positions, tensors)
    return sorted(group for group in groups if len(group) > 1)


def _connected(positions: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    groups: list[list[int]] = []
    for position in positions:
        tensor = tensors[position]
        joined = [group for group in groups if any(share_memory(tensor, tensors[other]) for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted(itertools.chain([position], *joined)))
    return groups


def span(tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
    """First byte and number of bytes of the part of a storage that contains `tensors`.

    They are on one storage and not empty. Each starts at a multiple of its item size from the first byte.
    """
    starts = [start_of(tensor) for tensor in tensors]
    ends = [
        start + extent(tensor) * tensor.element_size() for start, tensor in zip(starts, tensors, strict=True)
    ]
    widest = max(tensor.element_size() for tensor in tensors)
    first = min(starts) // widest * widest
    return first, max(ends) - first


def extent(tensor: torch.Tensor) -> int:
    """Number of elements from the first to the last in memory, gaps included."""
    return extent_of(tensor.size(), tensor.stride())


def extent_of(size: Sequence[int], stride: Sequence[int]) -> int:
    """As `extent`, for a tensor of these sizes and strides."""
    return 0 if 0 in size else 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def by_stride(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dimensions from the largest stride to the smallest, after those of size 1, which lie anywhere."""
    return sorted(
        range(len(size)), key=lambda dim: (bool(size[dim] > 1), -stride[dim] if size[dim] > 1 else 0)
    )


def start_of(tensor: torch.Tensor) -> int:
    """Offset of the first element, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _steps(tensor: torch.Tensor) -> _Steps:
    itemsize = tensor.element_size()
    steps = [
        (s * itemsize, n - 1) for n, s in zip(tensor.size(), tensor.stride(), strict=True) if n > 1 and s
    ]
    return (*steps, (1, itemsize - 1))


@functools.lru_cache(maxsize=4096)
def _meet(distance: int, a: _Steps, b: _Steps) -> bool:
    """Whether `a` and `b`, which starts `distance` bytes later, have a byte in common."""
    # Counting b's indices from their ends turns the difference of two sums into one sum.
    target = distance + sum(stride * last for stride, last in b)
    merged: dict[int, int] = {}
    for stride, last in (*a, *b):
        merged[stride] = merged.get(stride, 0) + last
    terms = sorted(merged.items(), reverse=True)
    reach = [*itertools.accumulate((stride * last for stride, last in reversed(terms)), initial=0)][::-1]
    divisor = [*itertools.accumulate((stride for stride, _ in reversed(terms)), math.gcd, initial=0)][::-1]

    def reachable(position: int, rest: int) -> bool:
        if rest < 0 or rest > reach[position]:
            return False
        if position == len(terms):
            return True
        if rest % divisor[position]:
            return False
        stride, last = terms[position]
        fewest = max(0, -(-(rest - reach[position + 1]) // stride))
        return any(
            reachable(position + 1, rest - count * stride)
            for count in range(fewest, min(last, rest // stride) + 1)
        )

    return reachable(0, target)


def restrided(tensor: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """`tensor` in dense memory, with dimensions in the order of these strides; differentiable."""
    order = sorted(range(len(stride)), key=stride.__getitem__, reverse=True)
    return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
