"""Sums of everything are cut in two, and come out the same."""

import pytest
import torch

from tests.kernels.reference import Emissions, assert_same

WHOLE = {
    "sum": torch.sum,
    "sum that keeps its dimensions": lambda x: x.sum((0, 1), keepdim=True),
    "mean": torch.mean,
    "greatest": torch.max,
    "least": lambda x: x.amin((0, 1)),
    "sum of squares": lambda x: (x * x).sum(),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_is_cut_in_two(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    x = torch.randn(1000, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_same(WHOLE[name], x, rtol=2e-2 if dtype is torch.bfloat16 else 1e-4, atol=1e-3)
    first, second = (one.kernel for fused in emissions.made for one in fused.kernels)
    assert (first.num_results, first.num_reduced) == (1000, 64)
    assert (second.num_results, second.num_reduced) == (1, 1000)
    if dtype is torch.bfloat16 and name not in ("greatest", "least"):
        assert first.stores[0].stored is torch.float32


def test_long_rows_are_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    assert_same(lambda x: (x / x.norm(dim=-1, keepdim=True)).abs().amax(), torch.randn(64, 1000))
    first, second = (one.kernel for fused in emissions.made for one in fused.kernels)
    assert (first.num_results, first.num_reduced) == (64, 1000)
    assert (second.num_results, second.num_reduced) == (1, 64)


def test_a_small_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    assert_same(torch.sum, torch.randn(8, 8))
    assert emissions.num_kernels() == 1


def test_a_count_without_divisors_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    assert_same(torch.sum, torch.randn(65537), rtol=1e-4, atol=1e-3)
    assert emissions.num_kernels() == 1


def test_a_transposed_operand() -> None:
    assert_same(WHOLE["sum of squares"], torch.randn(300, 200).t().requires_grad_(), rtol=1e-4, atol=1e-3)
