"""Random programs over DTensors on two ranks: the compiled call and eager cannot be told apart.

They are grown here, in one process of a fake group of two ranks, where shapes and placements are the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, assume, event, given, settings

from aotdist.errors import UnsupportedProgram
from tests.ranks.harness import World
from tests.semantics.observation import same_as_eager
from tests.semantics.programs import Program, programs
from tests.semantics.searching import OF_BACKWARD, REFUSALS, SWEEP, timeout
from tests.subclasses.dtensor_vocabulary import VOCABULARY
from tests.subclasses.dtensors import row

KNOWN = (
    *REFUSALS,
    *OF_BACKWARD,
    "is a view of a DTensor that was redistributed for it",
    "and is no view of it to autograd",
)
"""What a random program may be refused for."""

pytestmark = [pytest.mark.ranks, timeout]


@pytest.fixture(scope="module", autouse=True)
def rehearsing() -> Iterator[None]:
    """A group of two ranks whose other rank is not there."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()
        row.cache_clear()


def generated_case(program: Program) -> str | None:
    """What became of it, if it was not compared."""
    row()
    if program.refused_by_eager() is not None:
        return "eager refuses it"
    try:
        same_as_eager(program.scenes, seed=1)
    except UnsupportedProgram as refusal:
        assert any(reason in refusal.what for reason in KNOWN), refusal
        return f"refused: {refusal.what}"
    return None


@settings(
    max_examples=3000 if SWEEP else 4 * settings().max_examples,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.function_scoped_fixture,
    ],
)
@given(program=programs(VOCABULARY))
def test_random_programs(world2: World, program: Program) -> None:
    found = world2.run(generated_case, program, timeout=40)
    assert found[0] == found[1]
    event(str(found[0]).partition("`")[0])
    assume(found[0] is None)
