"""Programs that draw from generators which compiled calls would not draw from."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

import aotdist
from aotdist.errors import UnsupportedProgram

DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy.random": lambda: float(np.random.rand()),
}


@pytest.mark.parametrize("name", DRAWS)
def test_refused_and_nothing_is_drawn(name: str) -> None:
    draw = DRAWS[name]
    random.seed(0)
    np.random.seed(0)
    expected = draw()
    random.seed(0)
    np.random.seed(0)
    with pytest.raises(UnsupportedProgram, match=f"draws from the generator of `{name}`"):
        aotdist.compile(lambda x: x * draw(), backend="fx")(torch.ones(2))
    assert draw() == expected
