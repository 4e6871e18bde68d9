"""Parties, views, differences and verdicts: everything about agreement that needs no other rank."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotdist.passes.collectives import Collective
from aotdist.runtime.ranks.sequence import (
    Differ,
    Group,
    Refused,
    Sequenced,
    Shared,
    Step,
    describe_difference,
    digest,
    judge,
    parties_of,
    shown_steps,
    steps_of,
    verdict_from_notice,
    view,
    widest,
)

GROUPS = {
    "everyone": Group("everyone", (0, 1, 2, 3), 0),
    "row": Group("row", (0, 1), 0),
    "row again": Group("row again", (0, 1), 1),
}
FOUND = Collective(
    "all_reduce", "row", 2, "sum", "bfloat16", 1024, 2048, None, "all_reduce_1", "model.py:7   x.sum()"
)


def steps(*groups: str) -> tuple[Step, ...]:
    return steps_of([replace(FOUND, group=group, numel=n) for n, group in enumerate(groups)], GROUPS)


def test_groups_without_peers_have_no_steps():
    assert [step.group.name for step in steps("row", "alone", "everyone")] == ["row", "everyone"]


def test_parties_are_groups_and_what_groups_share():
    groups = [Group("a", (0, 1, 2, 3), 0), Group("b", (0, 1, 4, 5), 0), Group("c", (0, 6), 0)]
    assert parties_of(groups) == ((0, 1, 2, 3), (0, 1, 4, 5), (0, 1), (0, 6))


@given(st.lists(st.sets(st.integers(0, 9), min_size=2, max_size=6), max_size=5))
def test_parties_are_closed_under_sharing(members):
    parties = parties_of(Group("g", tuple(sorted(ranks)), 0) for ranks in members)
    assert len(set(parties)) == len(parties)
    for a in parties:
        for b in parties:
            common = tuple(sorted(set(a) & set(b)))
            assert len(common) < 2 or common in parties


def test_the_widest_parties_stand_in_no_other():
    assert set(widest([(0, 1, 2, 3), (0, 1), (0, 4)])) == {(0, 1, 2, 3), (0, 4)}


def test_a_party_sees_the_steps_that_all_of_it_takes_part_in():
    mine = steps("everyone", "row", "everyone")
    assert view(mine, (0, 1)) == mine
    assert view(mine, (0, 1, 2, 3)) == (mine[0], mine[2])


@pytest.mark.parametrize(
    "change",
    [
        {"op": "all_gather_into_tensor"},
        {"reduce_op": "avg"},
        {"dtype": "float32"},
        {"numel": 1},
        {"group": "everyone"},
        {"group": "row again"},
        {"serves": ("blocks.0.weight",)},
    ],
)
def test_what_must_be_equal(change):
    assert digest(steps_of([FOUND], GROUPS)) != digest(steps_of([replace(FOUND, **change)], GROUPS))


@pytest.mark.parametrize("change", [{"node": "n"}, {"source": None}, {"unit": "blocks.3"}])
def test_what_may_differ(change):
    assert digest(steps_of([FOUND], GROUPS)) == digest(steps_of([replace(FOUND, **change)], GROUPS))


def test_names_of_groups_may_differ():
    renamed = {"other": replace(GROUPS["row"], name="other")}
    assert digest(steps_of([FOUND], GROUPS)) == digest(steps_of([replace(FOUND, group="other")], renamed))


def test_ranks_may_send_unequal_parts_of_an_all_to_all():
    one, two = (replace(FOUND, op="all_to_all_single", numel=n) for n in (3, 5))
    assert digest(steps_of([one], GROUPS)) == digest(steps_of([two], GROUPS))


def shown(*found: Sequenced):
    """Steps as they come back from the board, which keeps JSON."""
    return json.loads(json.dumps(shown_steps(steps_of(found, GROUPS))))


def test_a_difference_names_both_sides():
    left, right = shown(FOUND, FOUND), shown(FOUND, replace(FOUND, numel=1025, source=None))
    assert describe_difference({0: left, 5: right}) == (
        "they part at collective 2, after all_reduce sum of 1,024 bfloat16 (2,048 bytes) over ranks 0, 1\n"
        "  rank 0 runs all_reduce sum of 1,024 bfloat16 (2,048 bytes) over ranks 0, 1 (node all_reduce_1)\n"
        "         at model.py:7   x.sum()\n"
        "  rank 5 runs all_reduce sum of 1,025 bfloat16 (2,048 bytes) over ranks 0, 1 (node all_reduce_1)"
    )


def test_a_sequence_may_end_early():
    assert describe_difference({0: shown(FOUND), 1: shown()}).splitlines() == [
        "they part at collective 1",
        "  rank 0 runs all_reduce sum of 1,024 bfloat16 (2,048 bytes) over ranks 0, 1 (node all_reduce_1)",
        "         at model.py:7   x.sum()",
        "  rank 1 runs none: its sequence ends after 0",
    ]


WEIGHT = Shared("state", "`a.weight` float32 [8, 8]", ("row",))


@pytest.mark.parametrize(
    ("left", "right", "words"),
    [
        (WEIGHT, replace(WEIGHT, text="`b.weight`"), ("has `a.weight` float32 [8, 8]", "has `b.weight`")),
        (replace(WEIGHT, kind="read"), WEIGHT, ("has none: its sequence ends after 0", "has `a.weight`")),
        (replace(WEIGHT, kind="read", text="`a`"), replace(WEIGHT, kind="read", text="`b`"), ("`a`", "`b`")),
        (replace(FOUND, serves=("a",)), replace(FOUND, serves=("b",)), ("for `a`", "for `b`")),
    ],
)
def test_shared_state_is_compared_before_collectives(left, right, words):
    said = describe_difference({0: shown(left, FOUND), 1: shown(right, replace(FOUND, numel=1))})
    _, one, two = [line for line in said.splitlines() if " at " not in line or "part" in line]
    assert words[0] in one and words[1] in two


def test_state_of_several_groups_is_a_step_of_each_in_one_order():
    ordered = steps_of([replace(WEIGHT, groups=("row", "everyone"))], GROUPS)
    again = steps_of([replace(WEIGHT, groups=("everyone", "row"))], GROUPS)
    assert [step.key for step in ordered] == [step.key for step in again] and len(ordered) == 2


def entry(reach: int = 1, **digests: str) -> dict[str, Any]:
    return {
        "digests": {key.strip("p").replace("_", "-"): text for key, text in digests.items()},
        "reach": reach,
    }


def test_equal_entries_agree_for_the_rounds_of_the_farthest():
    assert judge({0: entry(1, p0_1="x"), 1: entry(3, p0_1="x")}) == 3


def test_the_most_common_side_comes_first():
    entries = {0: entry(p0_3="odd"), 1: entry(p0_3="x"), 2: entry(p0_3="x"), 3: entry(p0_3="other")}
    assert judge(entries) == Differ((0, 1, 2, 3), [[1, 2], [0], [3]])


def test_a_party_that_one_of_its_ranks_does_not_know_is_a_difference():
    entries = {0: entry(p0_2="x", p0_1="y"), 1: entry(p0_2="x"), 2: entry(p0_2="x")}
    assert judge(entries) == Differ((0, 1), [[0], [1]])


@pytest.mark.parametrize(
    "verdict",
    [
        2,
        Differ([0, 8, 16], [[0, 16], [8]]),
        Refused("lost", "rank 1 died", "look"),
        Refused("unsupported", "rank 1 cannot compile `f`", "look", "the kind of call"),
    ],
)
def test_verdicts_travel(verdict):
    notice = verdict if isinstance(verdict, int) else asdict(verdict)
    assert verdict_from_notice(json.loads(json.dumps(notice))) == verdict
