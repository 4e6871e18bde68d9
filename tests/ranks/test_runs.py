"""Each run has a number, and ranks compare it: who runs something else hears of it, and so do all."""

import pytest

from aotdist.errors import BadSettings
from aotdist.settings import Settings
from tests.ranks import cases_runs as cases
from tests.ranks.harness import Died, Outcome, World, fresh_world

pytestmark = pytest.mark.ranks

SOON_S = 10.0

SAID = {
    "eval against train": ("they part at collective 2", "rank 1 runs none: its sequence ends after 1"),
    "a known branch flips": ("rank 0 runs none", "rank 1 runs all_reduce max of 8"),
    "a skipped backward": ("rank 0 `FSDPSequential` (backward), rank 1 `FSDPSequential` (forward)",),
    "a backward of other results": ("they part at collective", "rank 0 runs reduce_scatter_tensor"),
    "a known backward of other results": ("they part at collective", "rank 0 runs reduce_scatter_tensor"),
    "models in another order": ("they part at shared parameter or buffer", "in `FSDPSequential` number"),
    "new to the last rank": ("rank 0 runs all_reduce max of 8", "rank 1 runs none"),
    "new to the first rank": ("rank 0 runs none", "rank 1 runs all_reduce max of 8"),
}
"""What the error says on either rank."""


@pytest.mark.parametrize("backend", ["fx", pytest.param("inductor", marks=pytest.mark.sweep)])
def test_known_programs_in_another_order_are_a_divergence_on_all_ranks(backend: str, world2: World):
    assert SAID.keys() == cases.DIVERGING.keys()
    for heard in world2.run(cases.all_of, "DIVERGING", backend, timeout=240.0):
        for name, words in SAID.items():
            told = heard[name]
            assert told is not None and told[0] == "RankDivergence" and told[2] < SOON_S, (name, told)
            assert "rank 0 and rank 1 are about to run different programs over ranks 0, 1" in told[1]
            assert all(each in told[1] for each in words), (name, told)


@pytest.mark.parametrize(
    ("num_ranks", "backend"),
    [
        (2, "fx"),
        pytest.param(4, "fx", marks=pytest.mark.sweep),
        pytest.param(2, "inductor", marks=pytest.mark.sweep),
        pytest.param(4, "inductor", marks=pytest.mark.sweep),
    ],
)
def test_what_ranks_may_do_by_themselves_alarms_nobody(
    num_ranks: int, backend: str, request: pytest.FixtureRequest
):
    world: World = request.getfixturevalue(f"world{num_ranks}")
    told = world.run(cases.all_of, "GOING_ON", backend, timeout=240.0)
    assert told == [dict.fromkeys(cases.GOING_ON)] * num_ranks


def said(outcome: Outcome) -> tuple[str, str]:
    """What a rank raised before it left: class, and first line."""
    assert isinstance(outcome, Died) and outcome.exitcode == cases.GONE, outcome
    kind, what, *_ = [*outcome.output.splitlines(), "", ""]
    return kind, what


@pytest.mark.parametrize(
    ("case", "num_ranks", "words"),
    [
        (cases.in_another_order, 2, "rank 0 and rank 1 are about to run different programs"),
        (cases.flips_and_leaves, 2, "rank 0 and rank 1 are about to run different programs"),
        (cases.new_and_seldom_checked, 2, "rank 0 and rank 1 are about to run different programs"),
        (
            cases.one_of_a_mesh_flips,
            4,
            "rank 2 and rank 3 are about to run different programs over ranks 2, 3",
        ),
    ],
)
def test_all_ranks_hear_of_a_divergence_though_the_host_of_the_store_leaves(case, num_ranks, words):
    with fresh_world(num_ranks, store="rank0") as world:
        outcomes = world.outcomes(case)
    for kind, what in map(said, outcomes):
        assert kind == "RankDivergence" and what.startswith(words)


def test_a_host_that_fails_to_compile_is_heard():
    with fresh_world(2, store="rank0") as world:
        failed, other = map(said, world.outcomes(cases.first_fails))
    assert failed == ("ValueError", "no such rule")
    assert other == ("RankLost", "rank 0 failed to compile `run`: ValueError: no such rule")


def test_ranks_that_die_before_they_compile_are_missed_at_once():
    with fresh_world(3) as world:
        survivor, *_ = world.outcomes(cases.two_die_before_they_compile, timeout=SOON_S)
    kind, what = said(survivor)
    assert kind == "RankLost"
    assert "rank 1 left before it called `aotdist.compile`: its connection is closed" in what
    assert "rank 2 died: its process is gone" in what


@pytest.mark.parametrize("store", ["tcp", "rank0"])
def test_a_step_too_many_is_a_divergence(store):
    with fresh_world(2, store) as world:
        done, other = map(said, world.outcomes(cases.one_step_too_many))
    assert done == ("nothing", "")
    assert other[0] == "RankDivergence" and other[1].startswith("rank 0 has ended after 4 runs, and rank 1")


@pytest.mark.parametrize("text", ["never", "steps", "steps:0", "steps:-1", "every:2", ""])
def test_a_setting_that_says_nothing_is_refused(text):
    with pytest.raises(BadSettings, match="choose every, first, or steps:N"):
        Settings(check_ranks=text)


def test_the_environment_may_say_when_to_check():
    assert Settings.from_environment({"AOTDIST_CHECK_RANKS": "steps:100"}).check_every() == 100
    with pytest.raises(BadSettings, match="is 'often' .the environment has AOTDIST_CHECK_RANKS"):
        Settings.from_environment({"AOTDIST_CHECK_RANKS": "often"})
    assert (Settings().check_every(), Settings(check_ranks="first").check_every()) == (1, None)
