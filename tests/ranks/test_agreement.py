"""Ranks agree before they run: any difference raises on every rank, within seconds, with both sides named."""

import signal

import pytest

from tests.ranks import cases_agreement as cases
from tests.ranks.harness import Died, Returned, World, fresh_world

pytestmark = pytest.mark.ranks

SOON_S = 5.0


@pytest.mark.parametrize(
    ("change", "ours", "theirs"),
    [
        ("order", "collective 1\n  rank 0 runs all_gather_into_tensor of 64", "rank 1 runs all_reduce sum"),
        ("shape", "rank 0 runs all_reduce sum of 8 float32 (32 bytes)", "rank 1 runs all_reduce sum of 9"),
        ("extra", "rank 0 runs none: its sequence ends after 3", "rank 1 runs all_reduce max of 1"),
        ("missing", "rank 0 runs reduce_scatter_tensor avg", "rank 1 runs none: its sequence ends after 2"),
        ("reduction", "rank 0 runs reduce_scatter_tensor avg", "rank 1 runs reduce_scatter_tensor sum"),
        ("nothing", "rank 0 runs all_gather_into_tensor", "rank 1 runs none"),
    ],
)  # fmt: skip
def test_two_ranks_that_diverge_both_say_where(world2: World, change, ours, theirs):
    for kind, message, seconds in world2.run(cases.one_rank_differs, change, 1):
        assert kind == "RankDivergence" and seconds < SOON_S
        assert ours in message and theirs in message
        assert (
            "rank 0 and rank 1 are about to run different programs over ranks 0, 1 in `train_step`" in message
        )


def test_the_message_has_the_source_line_of_each_side(world2: World):
    (_, message, _), _ = world2.run(cases.one_rank_differs, "shape", 0)
    assert "(node all_reduce_9)\n         at theirs.py:2   all_reduce(x)" in message
    assert "(node all_reduce_8)\n         at ours.py:2   all_reduce(x)" in message
    assert "they part at collective 2, after all_gather_into_tensor of 64 float32" in message


def test_dtypes_are_compared(world2: World):
    assert [kind for kind, _, _ in world2.run(cases.dtypes_differ)] == ["RankDivergence"] * 2


def test_the_odd_one_out_is_named(world4: World):
    for kind, message, _ in world4.run(cases.one_rank_differs, "shape", 2):
        assert kind == "RankDivergence"
        assert "ranks 0, 1, 3 and rank 2 are about to run different" in message


def test_four_ranks_agree_within_50_ms(world4: World):
    by_rank = world4.run(cases.times_agreement, 9)
    assert min(max(seconds) for seconds in zip(*by_rank, strict=True)) < 0.050  # other processes only add


@pytest.mark.parametrize("failing", [[1], [0]], ids=["another fails", "the leader fails"])
def test_a_failed_compilation_fails_everywhere(world4: World, failing):
    heard = world4.run(cases.fails_to_compile, failing)
    for rank, (kind, message, seconds) in enumerate(heard):
        assert seconds < SOON_S
        assert kind == ("ValueError" if rank in failing else "RankLost")
        if rank not in failing:
            why = (
                f"rank {failing[0]} failed to compile `train_step`: ValueError: no rule on rank {failing[0]}"
            )
            assert message.splitlines()[0] == why


def test_a_rank_that_waits_already_hears_of_a_failure(world2: World):
    (kind, message, seconds), _ = world2.run(cases.fails_late)
    assert kind == "RankLost" and "rank 1 failed to compile" in message and seconds < SOON_S


def test_ranks_that_catch_a_failure_can_compile_again(world2: World):
    first, second = world2.run(cases.fails_then_tries_again)
    assert first == ["RankLost", None, "ValueError", None]
    assert second == ["ValueError", None, "ValueError", None]


@pytest.mark.parametrize("missing", [0, 3], ids=["the leader", "another"])
def test_a_rank_that_never_arrives_is_named(missing):
    with fresh_world(4) as world:
        heard = world.run(cases.never_arrives, missing)
    for kind, message, seconds in (said for said in heard if said is not None):
        assert kind == "RankLost" and 1.0 <= seconds < SOON_S
        assert f"rank {missing} did not come to agree on `train_step` within 1 s" in message
        assert f"rank {missing} last reported: compiling `eval_step`" in message


def test_a_rank_that_arrives_too_late_is_told(world2: World):
    waited, late = world2.run(cases.arrives_too_late)
    assert late[0] == waited[0] == "RankLost" and late[1] == waited[1] and late[2] < 0.5


@pytest.mark.parametrize("dying", [0, 1, 3])
def test_a_rank_that_dies_while_it_compiles_is_named(dying):
    with fresh_world(4) as world:
        outcomes = world.outcomes(cases.dies_compiling, dying)
    assert isinstance(outcomes.pop(dying), Died)
    for outcome in outcomes:
        assert isinstance(outcome, Returned)
        kind, message, seconds = outcome.value
        assert (
            kind == "RankLost" and f"rank {dying} died: its process is gone" in message and seconds < SOON_S
        )


def test_the_store_may_die_with_a_rank():
    with fresh_world(2, store="rank0") as world:
        died, survivor = world.outcomes(cases.dies_compiling, 0)
    assert isinstance(died, Died) and died.exitcode == -signal.SIGKILL
    assert isinstance(survivor, Returned)
    kind, message, seconds = survivor.value
    assert kind == "StoreGone" and "the store that the ranks meet in no longer answers" in message
    assert seconds < SOON_S


def test_groups_of_a_mesh_agree_each_for_itself(world4: World):
    assert world4.run(cases.agrees_on_a_mesh) == [[None, None, None]] * 4


def test_a_rank_may_be_alone_with_a_new_call_that_runs_what_was_agreed_on():
    with fresh_world(2) as world:
        heard = world.run(cases.a_new_call_on_one_rank)
    assert [told[:3] for told in heard] == [[None, None, None]] * 2
    assert [told[3][0] for told in heard] == ["RankDivergence"] * 2


def test_what_was_agreed_on_outlives_the_artifact(world2: World):
    """A rank that dropped it, and compiles it again, does not wait for the other, which never dropped it."""
    assert world2.run(cases.drops_and_compiles_again) == [[7.0, 9.0, 10.0, 7.0, 2], [7.0, 9.0, 9.0, 7.0, 2]]


def test_so_may_a_group_of_a_mesh(world4: World):
    assert world4.run(cases.a_new_call_of_one_group) == [[None, None, None]] * 4


def test_a_difference_in_one_group_stops_the_ranks_of_the_others():
    with fresh_world(4) as world:  # one in which nobody has failed before
        heard = world.run(cases.differs_on_a_mesh)
    assert [kind for kind, _, _ in heard] == ["RankDivergence"] * 4
    assert all("rank 2 and rank 3 are about to run different programs" in message for _, message, _ in heard)
    assert all("rank 3 runs all_reduce sum of 9" in message for _, message, _ in heard[2:])
    assert all(seconds < SOON_S for _, _, seconds in heard)


@pytest.mark.parametrize("case", [cases.groups_in_another_order, cases.one_rank_ignores_a_group])
def test_ranks_that_share_two_groups_take_them_in_one_order(case):
    with fresh_world(4) as world:
        heard = world.run(case)
    assert [kind for kind, _, _ in heard] == ["RankDivergence"] * 4
    assert all("over ranks 0, 1" in message and seconds < SOON_S for _, message, seconds in heard)


def test_two_groups_of_the_same_ranks_are_told_apart(world2: World):
    for kind, message, _ in world2.run(cases.two_groups_of_the_same_ranks):
        assert kind == "RankDivergence" and "their group" in message


@pytest.mark.parametrize("store", ["tcp", "rank0", "file"])
def test_any_store_will_do(store):
    with fresh_world(2, store) as world:
        assert world.run(cases.fails_then_tries_again)[0] == ["RankLost", None, "ValueError", None]
        assert [said[0] for said in world.run(cases.dtypes_differ)] == ["RankDivergence"] * 2


def test_a_second_life_in_the_same_store():
    with fresh_world(2) as world:
        for heard in world.run(cases.joins_again_in_the_same_store):
            assert heard[:4] == [None] * 4 and heard[4][0] == "RankDivergence"


def test_no_peers_nothing_to_agree_on():
    with fresh_world(1) as world:
        assert world.run(cases.without_peers) == [[None, None, None]]


def test_a_group_of_one_rank_takes_no_part(world2: World):
    assert world2.run(cases.group_of_one_rank) == [None, None]


def test_ranks_that_are_threads():
    with fresh_world(1) as world:
        ((*heard, last),) = world.run(cases.as_threads, 3)
    assert [said[0] for said in (*heard, last)] == ["RankDivergence"] * 3
    assert "ranks 0, 1 and rank 2 are about to run different programs" in last[1]
