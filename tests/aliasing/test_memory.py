"""Whether strided tensors share a byte, against counting the bytes."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aotdist.aliasing.memory import overlapping_groups, share_memory, span

BUFFER = torch.zeros(48)
DTYPES = (torch.float32, torch.int16, torch.uint8)


@st.composite
def parts(draw: st.DrawFn) -> torch.Tensor:
    """Any strided part of the buffer, of any dtype."""
    memory = BUFFER.view(draw(st.sampled_from(DTYPES)))
    size = draw(st.lists(st.integers(0, 4), max_size=3))
    stride = draw(st.lists(st.integers(0, 9), min_size=len(size), max_size=len(size)))
    extent = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n)
    offset = draw(st.integers(0, max(0, memory.numel() - extent)))
    return memory.as_strided(size, stride, offset) if offset + extent <= memory.numel() else memory[:0]


def bytes_of(tensor: torch.Tensor) -> set[int]:
    itemsize = tensor.element_size()
    indices = itertools.product(*map(range, tensor.size()))
    places = (sum(i * s for i, s in zip(index, tensor.stride(), strict=True)) for index in indices)
    firsts = ((tensor.storage_offset() + place) * itemsize for place in places)
    return {first + byte for first in firsts for byte in range(itemsize)}


@given(parts(), parts())
def test_sharing_is_decided_to_the_byte(a: torch.Tensor, b: torch.Tensor) -> None:
    assert share_memory(a, b) == share_memory(b, a) == (not bytes_of(a).isdisjoint(bytes_of(b)))


def test_blocks_of_a_matrix() -> None:
    """The blocks of a preconditioner: on one storage, interleaved in memory, and apart."""
    matrix = torch.zeros(2048, 4096)
    left, right = matrix[:, :2048], matrix[:, 2048:]
    assert not share_memory(left, right)
    assert share_memory(left, matrix[:, 2047:])
    assert not share_memory(matrix[::2], matrix[1::2])


def test_groups_are_connected_through_others() -> None:
    x, y = torch.zeros(10), torch.zeros(10)
    assert overlapping_groups([x[:4], y, x[3:7], x[8:], x[6:8], y[2:2]]) == [[0, 2, 4]]


@pytest.mark.parametrize("parts", [lambda x: (x[2:4], x[1:3]), lambda x: (x.view(2, 6)[:, 1:3], x[4:5])])
def test_the_span_covers_all(parts) -> None:
    x = torch.arange(12.0)
    members = parts(x)
    start, num_bytes = span(members)
    covered = set().union(*map(bytes_of, members))
    assert min(covered) == start and max(covered) == start + num_bytes - 1
