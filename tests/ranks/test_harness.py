"""The worlds of ranks themselves: results, failures of every kind, and recovery."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import MANY_GROUPS, Died, Raised, RanksFailed, Returned, Stuck, World, fresh_world

pytestmark = pytest.mark.ranks


def sums_ranks(start: int) -> tuple[int, float]:
    total = torch.tensor(float(start + dist.get_rank()))
    dist.all_reduce(total)
    return os.getpid(), total.item()


def first_random_number() -> float:
    return torch.rand(()).item()


def raises_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError("as told")
    return "fine"


def makes_groups(number: int) -> int:
    for _ in range(number):
        dist.new_group()
    return os.getpid()


def dies_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("about to go", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def hangs_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def returns_what_cannot_travel() -> object:
    return lambda: None


@pytest.mark.parametrize("store", ["tcp", "rank0", "file"])
def test_a_fresh_world_meets_in_any_store(store):
    with fresh_world(2, store) as world:
        assert [total for _, total in world.run(sums_ranks, 1)] == [3.0, 3.0]


def test_a_lasting_world_keeps_its_processes(world2: World, world4: World):
    first = world2.run(sums_ranks, 0)
    assert world2.run("tests.ranks.test_harness:sums_ranks", 0) == first
    assert [total for _, total in world4.run(sums_ranks, 0)] == [6.0] * 4


def test_ranks_with_many_process_groups_are_replaced():
    with fresh_world(2) as world:
        before = world.run(makes_groups, 1)
        assert world.run(makes_groups, MANY_GROUPS) == before
        assert set(world.run(makes_groups, 0)).isdisjoint(before)


def test_every_case_starts_with_the_same_seed(world2: World):
    first, second = world2.run(first_random_number)
    assert first == second == world2.run(first_random_number)[0]


def test_an_error_on_one_rank_reports_all_and_the_world_recovers(world2: World):
    with pytest.raises(RanksFailed, match="(?s)rank 0 returned 'fine'.*rank 1 raised.*raises_on.*as told"):
        world2.run(raises_on, 1)
    assert [total for _, total in world2.run(sums_ranks, 0)] == [1.0, 1.0]


def test_a_result_that_cannot_travel_is_an_error(world2: World):
    assert [type(outcome) for outcome in world2.outcomes(returns_what_cannot_travel)] == [Raised, Raised]


def test_a_death_is_told_with_what_was_printed():
    with fresh_world(2) as world:
        survivor, died = world.outcomes(dies_on, 1)
    assert survivor == Returned(None)
    assert died == Died(-signal.SIGKILL, "about to go")


def test_a_hang_shows_its_stack():
    with fresh_world(2) as world:
        _, hanging = world.outcomes(hangs_on, 1, timeout=1.0)
    assert isinstance(hanging, Stuck) and "in hangs_on" in hanging.output
