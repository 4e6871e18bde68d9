"""Expert parallelism: collectives whose sizes depend on data."""

from __future__ import annotations

import pytest

from tests.ranks import cases_experts
from tests.ranks.harness import World

pytestmark = pytest.mark.ranks


def test_experts_on_ranks_get_the_rows_that_are_theirs(world2: World) -> None:
    world2.run(cases_experts.same_as_eager)


def test_what_inductor_does_not_compile_is_left_to_fx(world2: World) -> None:
    world2.run(cases_experts.close_to_eager)
