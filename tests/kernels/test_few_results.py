"""Reductions to few results are cut in two, and come out the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from aotdist.kernels.access import fast_axis
from tests.kernels.reference import Emissions, assert_same


def numbers(*sizes: int, **options: Any) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0), **options)


def batch_norm(x: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance = mean.clone(), variance.clone()
    return F.batch_norm(x, mean, variance, training=True) * 2, mean, variance


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "sum": (lambda x: x.sum((0, 2, 3)), (8, 16, 64, 64)),
    "sum that keeps its dimensions": (lambda x: x.sum((0, 2, 3), keepdim=True), (8, 16, 64, 64)),
    "mean": (lambda x: x.mean((0, 2, 3)), (8, 16, 64, 64)),
    "sum to two dimensions": (lambda x: x.sum((0, 2)), (8, 16, 64, 64)),
    "sum of rows": (lambda x: (x * x).sum(0), (9999, 32)),
    "moments": (lambda x: torch.var_mean(x, (0, 2, 3), correction=1), (8, 16, 64, 64)),
    "moments without correction": (
        lambda x: torch.var_mean(x, (2, 3), correction=0, keepdim=True),
        (4, 8, 128, 128),
    ),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_are_cut_in_two(name: str, channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    program, sizes = PROGRAMS[name]
    x = numbers(*sizes) + 3
    x = x.to(memory_format=torch.channels_last) if channels_last and x.dim() == 4 else x
    assert_same(program, x, rtol=1e-5, atol=1e-4)
    counts = {one.kernel.num_results for fused in emissions.made for one in fused.kernels}
    assert len(counts) == 2 and max(counts) >= 64  # type: ignore[type-var]


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_batch_norm_and_its_gradients(channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    x = numbers(8, 16, 64, 64, dtype=torch.float64) + 3
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    statistics = torch.zeros(16, dtype=torch.float64), torch.ones(16, dtype=torch.float64)
    assert_same(batch_norm, x.requires_grad_(), *statistics, rtol=1e-10, atol=1e-12)
    wide = [
        one for fused in emissions.made for one in fused.kernels if one.kernel.r and one.num_bytes > 2**20
    ]
    assert all(fast_axis(one.kernel) == ("x" if channels_last else "r") for one in wide)
    large = [one.kernel for fused in emissions.made for one in fused.kernels if one.num_bytes > 2**20]
    assert all(kernel.num_results >= 64 for kernel in large)


def test_where_many_results_are_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    assert_same(lambda x: x.sum(1), numbers(4096, 64))
    assert emissions.num_kernels() == 1
