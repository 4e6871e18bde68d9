"""Places of extremes are PyTorch's, ties, zeros and what is no number included, in one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aotdist
from tests.kernels.reference import Emissions, assert_same

INF, NAN = math.inf, math.nan
SPECIAL = torch.tensor(
    [
        [1.0, 3.0, 3.0, -2.0, -2.0],
        [-0.0, 0.0, -0.0, 0.0, -0.0],
        [0.0, -0.0, 0.0, -0.0, 0.0],
        [1.0, NAN, 5.0, NAN, INF],
        [-INF, -INF, -INF, -INF, -INF],
        [INF, -INF, INF, -INF, 0.0],
        [NAN, NAN, NAN, NAN, NAN],
    ]
)
OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda x: x.argmax(),
    "argmax_of_columns": lambda x: x.argmax(0, keepdim=True),
    "argmin": lambda x: x.argmin(-1),
    "argmin_kept": lambda x: x.argmin(keepdim=True),
    "max": lambda x: tuple(x.max(-1)),
    "max_of_columns": lambda x: tuple(x.max(0, keepdim=True)),
    "min": lambda x: tuple(x.min(1)),
}


@pytest.mark.parametrize(
    "dtype", (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8), ids=str
)
@pytest.mark.parametrize("which", OPERATORS)
def test_places_and_values_are_eager_s(which: str, dtype: torch.dtype) -> None:
    x = SPECIAL.to(dtype) if dtype.is_floating_point else (SPECIAL.nan_to_num(7, 9, 0) + 2).to(dtype)
    found, expected = aotdist.compile(OPERATORS[which], backend="triton")(x), OPERATORS[which](x)
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for one, other in pairs:
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        if dtype.is_floating_point and one.is_floating_point():
            numbers = ~other.isnan()
            assert torch.equal(one.signbit()[numbers], other.signbit()[numbers])


def test_a_row_is_reduced_in_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    x = torch.randn(8, 3000, generator=torch.Generator().manual_seed(0))
    for one, other in zip(aotdist.compile(top, backend="triton")(x), top(x), strict=True):
        torch.testing.assert_close(one, other)
    assert emissions.num_kernels() == 1
    assert not emissions.made[0].reasons


def top(x: Tensor) -> tuple[Tensor, Tensor]:
    probabilities = torch.softmax(x, -1)
    return probabilities.amax(-1), probabilities.argmax(-1)


def test_gradients_go_to_the_place() -> None:
    x = torch.randn(6, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert_same(lambda x: x.max(-1).values.square(), x)


def test_nothing_has_no_place() -> None:
    with pytest.raises(Exception, match="dim"):
        aotdist.compile(lambda x: x.argmax(), backend="triton")(torch.zeros(0, 3))
