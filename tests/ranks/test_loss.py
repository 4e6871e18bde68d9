"""A rank that dies in the middle of a step: every survivor raises `RankLost` with its number."""

import re
import signal

import pytest

from tests.ranks import cases_loss as cases
from tests.ranks.harness import Died, Outcome, World, fresh_world

pytestmark = pytest.mark.ranks

SOON_S = 10.0


def message_of(outcome: Outcome) -> str:
    """What a survivor printed before it ended; it must have heard of the loss soon."""
    assert isinstance(outcome, Died) and outcome.exitcode == cases.LOST, outcome
    found = re.search(r"^(ranks? .*)^after (\S+) s$", outcome.output, re.MULTILINE | re.DOTALL)
    assert found and float(found[2]) < SOON_S
    return found[1]


@pytest.mark.parametrize("way", ["kill", "exit"])
def test_the_survivor_of_two_names_the_dead(way):
    with fresh_world(2) as world:
        survivor, died = world.outcomes(cases.leaves_in_a_step, 1, way)
    assert isinstance(died, Died) and died.exitcode == (-signal.SIGKILL if way == "kill" else 1)
    assert message_of(survivor).startswith("rank 1 was lost while `train_step` ran: its process is gone\n")


@pytest.mark.parametrize("dead", [0, 2])
def test_four_ranks_name_the_same_one_also_those_it_did_not_talk_to(dead):
    with fresh_world(4) as world:
        outcomes = world.outcomes(cases.leaves_in_a_step, dead)
    del outcomes[dead]
    assert {message_of(outcome).splitlines()[0] for outcome in outcomes} == {
        f"rank {dead} was lost while `train_step` ran: its process is gone"
    }


def test_ranks_in_other_groups_name_the_one_that_started_it():
    """Rank 0 never talks to rank 3: it hears from those that did, though they are gone themselves by then."""
    with fresh_world(4) as world:
        outcomes = world.outcomes(cases.leaves_a_mesh, 3)
    for outcome in outcomes[:3]:
        assert message_of(outcome).startswith("rank 3 was lost")


def test_the_store_may_die_with_the_rank():
    with fresh_world(2, store="rank0") as world:
        _, survivor = world.outcomes(cases.leaves_in_a_step, 0)
    assert message_of(survivor).startswith("rank 0 was lost")


def test_a_rank_that_lives_but_does_not_come_is_named():
    with fresh_world(4) as world:
        outcomes = world.outcomes(cases.sleeps_through_the_timeout, 2)
    for outcome in (outcomes[0], outcomes[1], outcomes[3]):
        assert message_of(outcome).startswith(
            "rank 2 did not take part in a collective of `train_step` in time"
        )


def test_other_errors_pass_at_once(world2: World):
    for message, seconds in world2.run(cases.other_errors_pass):
        assert "inconsistent tensor size" in message and seconds < SOON_S


def test_watching_costs_nothing_to_speak_of(world2: World):
    assert min(world2.run(cases.cost_of_watching, 20_000)) < 10e-6  # 0.6 us on an idle core
