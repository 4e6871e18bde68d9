"""`dist.all_reduce` and its like inside of compiled programs."""

from __future__ import annotations

import pytest

from tests.ranks import cases_writing
from tests.ranks.harness import World

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("name", cases_writing.PROGRAMS)
def test_a_collective_that_writes_writes_as_in_eager(world2: World, name: str) -> None:
    world2.run(cases_writing.same_as_eager, name)


def test_others_are_refused_by_name(world2: World) -> None:
    world2.run(cases_writing.refused)
