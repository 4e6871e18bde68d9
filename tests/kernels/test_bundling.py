"""Kernels that compute the same over different tensors are one launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import aotdist
from benchmarks.kernels.optimizers import STEPS, State, random_state
from benchmarks.models import LlamaShape
from tests.kernels.reference import Emissions, assert_same

_SHAPE = LlamaShape(dim=32, num_layers=2, num_heads=2, vocab=50, sequence=4, batch=1)
_NUM_LAUNCHES = {"adamw": 2, "adamw_one_by_one": 2, "clipped_adamw": 4, "sgd": 1, "sgd_one_by_one": 1}


@pytest.fixture
def emissions(monkeypatch: pytest.MonkeyPatch) -> Emissions:
    return Emissions(monkeypatch)


def numbers(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def tensors(state: State) -> list[Tensor]:
    return [tensor for row in state.values() for tensor in row]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_all_parameters_is_few_launches(name: str, emissions: Emissions) -> None:
    expected, found = random_state(_SHAPE), random_state(_SHAPE)
    settings = {"is_compiling": True}
    step = aotdist.compile(STEPS[name], backend="triton", settings=settings)
    for _ in range(2):
        aotdist.compile(STEPS[name], backend="fx", settings=settings)(expected)
        step(found)
    torch.testing.assert_close(tensors(found), tensors(expected), rtol=2e-6, atol=1e-6)
    assert emissions.num_kernels() == _NUM_LAUNCHES[name]
    assert not emissions.made[0].reasons


def sines(*tensors: Tensor) -> list[Tensor]:
    return [tensor.sin() + 1 for tensor in tensors]


def num_members(emissions: Emissions) -> list[int]:
    return sorted(len(one.members) for fused in emissions.made for one in fused.kernels)


def test_sizes_may_differ(emissions: Emissions) -> None:
    assert_same(sines, *(numbers(*sizes) for sizes in ((4,), (6, 8), (3, 5, 4), (2000,))))
    assert num_members(emissions) == [4]


def test_dtypes_may_not(emissions: Emissions) -> None:
    assert_same(sines, numbers(4), numbers(8), numbers(4, dtype=torch.bfloat16))
    assert num_members(emissions) == [1, 2]


def test_what_16_bytes_do_not_divide_keeps_nobody_from_reading_them_at_once(emissions: Emissions) -> None:
    assert_same(sines, numbers(16), numbers(7), numbers(32), numbers(5))
    assert num_members(emissions) == [2, 2]


def test_strides_and_offsets_may_differ(emissions: Emissions) -> None:
    def columns(one: Tensor, other: Tensor) -> list[Tensor]:
        return [one[:, 1:5].exp(), other[:, 5:9].exp()]

    assert_same(columns, numbers(4, 8), numbers(6, 16))
    assert num_members(emissions) == [2]


def test_sums_over_different_tensors(emissions: Emissions) -> None:
    def squares(*tensors: Tensor) -> list[Tensor]:
        return [tensor.square().sum(1) for tensor in tensors]

    assert_same(squares, numbers(4, 60), numbers(6, 40), numbers(3, 52))
    assert num_members(emissions) == [3]


def test_sums_in_loops(emissions: Emissions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aotdist.kernels.launching.MAX_PERSISTENT", 64)
    monkeypatch.setattr("aotdist.kernels.launching._LOOPED_BLOCK", 32)
    assert_same(lambda x, y: (torch.softmax(x, 1), torch.softmax(y, 1)), numbers(4, 100), numbers(6, 132))
    assert num_members(emissions) == [2]


def test_other_numbers_are_not_taken_apart(emissions: Emissions) -> None:
    assert_same(lambda x, y: (x * 1e20, y * 1e25), numbers(4), numbers(8))
    assert num_members(emissions) == [1, 1]


def test_the_parts_of_a_bucket_are_one_launch(emissions: Emissions) -> None:
    """What `passes/bucket.py` hands to a gather: shards, cast and joined."""

    def bucket(*shards: Tensor) -> Tensor:
        return torch.cat([shard.bfloat16().flatten() for shard in shards])

    assert_same(bucket, *(numbers(at, 8) for at in range(1, 10)))
    assert num_members(emissions) == [1]


def test_what_one_needs_of_the_other_is_not_run_beside_it(emissions: Emissions) -> None:
    def chain(x: Tensor, w: Tensor) -> Tensor:
        return ((x.sin() @ w).sin() @ w).sin()

    assert_same(chain, numbers(8, 8), numbers(8, 8))
    assert num_members(emissions) == [1, 1, 1]


def test_bundles_do_not_wait_for_each_other(emissions: Emissions) -> None:
    """`sin` of one leads to `cos` of it, and `cos` of the other to `sin`: only one pair can be one launch."""

    def crossed(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (x.sin() @ w).cos(), (y.cos() @ w).sin()

    assert_same(crossed, numbers(8, 8), numbers(4, 8), numbers(8, 8))
    assert num_members(emissions) == [1, 1, 2]


def test_what_keeps_its_place_does_not_wait(emissions: Emissions) -> None:
    """Numbers are drawn by the one before the other is computed."""

    def program(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return torch.multinomial(x.sigmoid(), 1), y.sigmoid()

    assert_same(program, numbers(4, 8), numbers(6, 8))
    assert num_members(emissions) == [1, 1]


def test_nothing_large_waits(emissions: Emissions, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both weights cast at once would be in memory at once."""
    monkeypatch.setattr("aotdist.kernels.bundling.SMALL_BYTES", 64)

    def casts(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
        return F.linear(F.linear(x, one.exp()), other.exp())

    assert_same(casts, numbers(4, 8), numbers(16, 8), numbers(8, 16))
    assert num_members(emissions) == [1, 1]


def test_a_launch_has_no_more_tensors_than_arguments(
    emissions: Emissions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aotdist.kernels.bundling.MAX_TENSORS", 6)
    assert_same(sines, *(numbers(4 * at) for at in range(1, 8)))
    assert num_members(emissions) == [1, 3, 3]
