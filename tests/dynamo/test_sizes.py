"""Sizes and numbers that Dynamo leaves open are symbols here too."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.dynamo.comparison import same_as_eager


def leaf(*size: int) -> torch.Tensor:
    return torch.randn(*size, requires_grad=True)


def test_dynamic_from_the_start():
    made = same_as_eager(
        lambda x, y: (x.sum(0) * y).reshape(-1, 2),
        lambda: (leaf(6, 4), leaf(4)),
        lambda: (leaf(7, 4), leaf(4)),
        lambda: (leaf(6, 8), leaf(8)),
        dynamic=True,
    )
    assert [len(region.artifacts) for region in made] == [1]


def test_slices():
    """Their strides follow from sizes that the graph does not have."""
    slices = (lambda n: torch.randn(2, n, 4)[:, 1:], lambda n: torch.randn(3, n)[:, :-1].t())
    calls = [(lambda n=n: tuple(made_of(n).requires_grad_() for made_of in slices)) for n in (6, 7, 9)]
    made = same_as_eager(lambda x, y: ((x * 2).reshape(-1, 4), y.cumsum(0)), *calls, dynamic=True)
    assert [len(region.artifacts) for region in made] == [1]


def test_dynamic_when_a_size_was_seen_to_change():
    sizes = [(lambda n=n: (leaf(n, 4),)) for n in (3, 5, 6, 7)]
    made = same_as_eager(lambda x: x.sin().reshape(-1), *sizes)
    assert [len(region.artifacts) for region in made] == [1, 1]
    (name,) = [name for name, _ in made[1].artifacts[0].fit.numbers.sizes.symbols]
    assert f"{name} = x.size(0)" in made[1].source


@pytest.mark.parametrize("dynamic", [None, True])
def test_whole_numbers(dynamic: bool | None):
    calls = [(lambda n=n: (leaf(12, 2), n)) for n in (3, 2, 4, 6)]
    made = same_as_eager(lambda x, n: (x * n).view(n, -1), *calls, dynamic=dynamic)
    assert all(len(region.artifacts) == 1 for region in made)


def test_numbers_below_zero():
    calls = [(lambda n=n: (leaf(6, 4), n)) for n in (3, -2, -1, 0)]
    same_as_eager(lambda x, n: x.roll(n), *calls)


def test_floats():
    """Eager computes with Python's numbers, and not with tensors of these."""
    calls = [(lambda n=n: (torch.randn(4), n)) for n in (0.1, 0.7, 0.9)]
    same_as_eager(lambda x, rate: x * rate + (x.int() * rate), *calls)
    same_as_eager(lambda x, rate: torch.dropout(x, rate, train=True), *calls)


@torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
def test_numbers_that_depend_on_data():
    calls = [(lambda n=n: (leaf(6), torch.tensor(n))) for n in (3, 1, 6)]
    made = same_as_eager(lambda x, n: (x[x > 0].exp().sum() * n.item(), x[: n.item()]), *calls)
    assert [len(region.artifacts) for region in made] == [1]


@pytest.mark.filterwarnings("ignore:.*is compiled for the sizes at hand")
def test_numbers_that_a_body_takes():
    """A checkpoint and a branch get as operands what they close over: floats as tensors, sizes as numbers."""
    floats = [(lambda n=n: (leaf(4), n)) for n in (0.1, 0.7, 0.9)]
    same_as_eager(lambda x, rate: checkpoint(lambda y: (y * rate).sin(), x, use_reentrant=False), *floats)

    def branching(pred, x, y, n):
        return torch.cond(pred, lambda x: x.sum() * n + y.sum(), lambda x: x.sum() - y.sum(), (x,))

    sizes = [(lambda n=n: (torch.tensor(n > 3), leaf(n, 4), leaf(6, n), n)) for n in (3, 5)]
    same_as_eager(branching, *sizes, dynamic=True)
