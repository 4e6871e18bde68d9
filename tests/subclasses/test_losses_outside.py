"""Gradients of random programs, with losses computed outside and several backwards: eager's, bit for bit."""

import random
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.ranks.harness import World
from tests.subclasses.dtensors import S0, S1, R, grid, numbers, spread
from tests.subclasses.losses_outside import SIZE, assert_all_as_in_eager

SEEDS = [range(20), pytest.param(range(20, 400), marks=pytest.mark.sweep)]


def _two(rng: random.Random, seed: int) -> torch.Tensor:
    return TwoTensor(numbers(SIZE, seed), numbers(SIZE, seed + 50))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "TwoTensor"])
def test_alone(kind: str, seeds: range) -> None:
    def look(grad: Any) -> Any:
        plains = [grad] if kind == "plain" else [grad.a, grad.b]
        return type(grad), grad.stride(), [(plain.stride(), plain.tolist()) for plain in plains]

    make = _two if kind == "TwoTensor" else lambda rng, seed: numbers(SIZE, seed)
    assert_all_as_in_eager(seeds, make, look)


def spread_case(seeds: range) -> None:
    mesh = grid()

    def look(grad: Any) -> Any:
        # After a redistribution, eager's strides need not be those of what lies inside.
        return grad.placements, grad.to_local().tolist()

    def make(rng: random.Random, seed: int) -> torch.Tensor:
        return spread(mesh, SIZE, rng.choice((R, S0, S1)), seed=seed)

    assert_all_as_in_eager(seeds, make, look)


@pytest.mark.ranks
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_spread_over_ranks(world2: World, seeds: range) -> None:
    """Factors outside are placed otherwise than results."""
    world2.run(spread_case, seeds, timeout=500)
