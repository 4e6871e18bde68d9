"""Views along what is sharded: autograd takes a redistributed copy for one, whose gradient is placed so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks.harness import World
from tests.subclasses.dtensors import S0, S1, SIZES, compare, leaf, non_leaf

pytestmark = pytest.mark.ranks

PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "a part": lambda x: (x * 2)[1:],
    "a row": lambda x: x.clone()[0],
    "several": lambda x: (x * 2).tensor_split(2),
    "a part of a part": lambda x: (x * 2)[1:].t()[1:],
    "beside its base": lambda x: ((y := x * 2), y[1:]),
    "beside a function of its base": lambda x: ((y := x * 2)[1:], y.sin()),
    "and used": lambda x: ((y := (x * 2)[1:]), y.sin()),
    "of an argument": lambda x: (x[1:], x * 2),
    "of a view of an argument": lambda x: ((y := x.t()), y[1:]),
}


def views_case(placement: str) -> None:
    for program in PROGRAMS.values():
        for make in (leaf, non_leaf):
            compare(program, make(SIZES["even"], {"S0": S0, "S1": S1}[placement]))


@pytest.mark.parametrize("placement", ["S0", "S1"])
def test_gradients_are_placed_as_in_eager(world2: World, placement: str) -> None:
    world2.run(views_case, placement)
