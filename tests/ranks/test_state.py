"""Ranks compare the parameters that they share, by name and in order, and nothing that is a rank's own."""

import pytest

from tests.ranks import cases_state as cases
from tests.ranks.harness import World

pytestmark = pytest.mark.ranks

NAMED = {
    "units in another order": ("reads `a.bias`", "reads `b.bias`"),
    "in another order in one unit": ("reads `a.bias`", "reads `b.bias`"),
    "weights in another order": ("reads `a`", "reads `b`"),
    "registered in another order": ("has `a.weight` float32 [8, 8] Shard(dim=0)", "has `b.weight` float32"),
    "a unit of the rank": ("288 bytes) over ranks 0, 1 for `b.weight`, `b.bias`", "for `a.weight`, `a.bias`"),
    "models swapped": ("has all of it in `FSDPTwo` number", "has all of it in `FSDPTwo` number"),
    "models swapped in a function": ("reads `generator.a.bias`", "reads `critic.a.bias`"),
    "tensor parallel in another order": ("reads `a.bias`", "reads `b.bias`"),
    "another name": ("has `first.weight`", "has `last.weight`"),
    "another placement": ("Shard(dim=0)", "Shard(dim=1)"),
    "replicas registered in another order": ("has `a.weight` float32", "has `b.weight` float32"),
}
"""What the error says of each of the two ranks."""


def test_what_is_another_program_is_a_divergence_on_all_ranks(world2: World):
    assert NAMED.keys() == cases.DIFFERENT.keys()
    for heard in world2.run(cases.different):
        for name, (ours, theirs) in NAMED.items():
            told = heard[name]
            assert told is not None and told[0] == "RankDivergence", (name, told)
            _, zero, one = told[1].replace("\n         at ", " at ").splitlines()[:3]
            assert zero.startswith("  rank 0 ") and ours in zero, (name, told[1])
            assert one.startswith("  rank 1 ") and theirs in one, (name, told[1])


@pytest.mark.sweep
def test_so_it_is_whatever_compiles_it(world2: World):
    for told in world2.run(cases.different_under_inductor):
        assert told[0] == "RankDivergence" and "rank 1 reads `b.bias`" in told[1]


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_what_is_a_ranks_own_is_not_compared(num_ranks, request: pytest.FixtureRequest):
    world: World = request.getfixturevalue(f"world{num_ranks}")
    assert world.run(cases.alike) == [dict.fromkeys(cases.ALIKE)] * num_ranks
