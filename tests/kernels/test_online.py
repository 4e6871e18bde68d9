"""Reductions that need another one of the same values share its loop."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kernels.reference import Emissions, assert_same

COLUMNS = 9001
"""More than a block holds."""

PROGRAMS: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "softmax": (lambda x: torch.softmax(x, -1), 2),
    "log softmax": (lambda x: torch.log_softmax(x, -1), 2),
    "logsumexp": (lambda x: torch.logsumexp(x, -1), 1),
    "softmax of more than is read": (lambda x: torch.softmax(x * 2 + x[:1], -1), 2),
    "variance": (lambda x: x.var(-1), 1),
    # Eager's mean of infinite values is none here; by itself it is infinite.
    "variance and mean": (lambda x: torch.var_mean(x[4:], -1, correction=0), 1),
    "layer norm": (lambda x: F.layer_norm(x, x.shape[-1:]), 2),
}
"""With how many loops there are."""

LEFT_ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "squares off another number than the mean": lambda x: (x - x.sum(-1, keepdim=True) / 3).square().sum(-1),
    "exponentials off the greatest of others": lambda x: (x - x.abs().amax(-1, keepdim=True)).exp().sum(-1),
}


def values(dtype: torch.dtype) -> Tensor:
    x = torch.randn(7, COLUMNS, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for row, value in enumerate((math.inf, -math.inf, math.nan)):
        x[row, 4321] = value
    x[3], x[4] = -math.inf, 1e4
    x[5] *= 1e4
    return x


def loops(emissions: Emissions) -> int:
    return emissions.sources().count("for start in")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_one_loop(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    emissions, (program, expected) = Emissions(monkeypatch), PROGRAMS[name]
    assert_same(program, values(dtype), rtol=1e-4 if dtype is torch.float32 else 1e-9, atol=1e-4)
    assert loops(emissions) == expected


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_two_loops(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    assert_same(LEFT_ALONE[name], values(torch.float32), rtol=1e-4, atol=1e-4)
    assert loops(emissions) == 2


@pytest.mark.parametrize("sizes, dim", [((2, COLUMNS), 1), ((300, 20), 0)], ids=["rows", "columns"])
def test_a_thread_keeps_one_sum_of_what_it_has_side_by_side(
    sizes: tuple[int, int], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    emissions = Emissions(monkeypatch)
    x = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    assert_same(lambda x: torch.softmax(x, dim), x, rtol=1e-4, atol=1e-6)
    assert loops(emissions) == 2
    assert emissions.sources().count("[XBLOCK, RBLOCK // 8]") == 2 * dim
