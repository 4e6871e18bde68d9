"""Agreement among hundreds of ranks: threads of one process around a store in memory."""

import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier

import pytest
import torch.distributed as dist

from aotdist.errors import AotdistError, RankDivergence, RankLost
from aotdist.passes.collectives import Collective
from aotdist.runtime.ranks.agreement import Meeting
from aotdist.runtime.ranks.board import Board, Party
from aotdist.runtime.ranks.sequence import Group, Step

NUM_RANKS = 256
EVERYONE: Party = tuple(range(NUM_RANKS))


def step(number: int, party: Party) -> Step:
    group = Group(str(party), party, 0)
    found = Collective(
        "all_reduce", group.name, len(party), "sum", "float32", number, 4 * number, None, "n", None
    )
    return Step(f"{number} over {party[0]}+{len(party)}", group, found)


@dataclass
class CountingStore:
    """A store that counts what it is asked, by the name of the question."""

    store: dist.HashStore
    asked: Counter[str] = field(default_factory=Counter)

    def __getattr__(self, name: str):
        self.asked[name] += 1
        return getattr(self.store, name)

    def __hash__(self) -> int:
        return id(self)


def program(rank: int) -> tuple[tuple[Step, ...], tuple[Party, ...]]:
    """Steps over everyone, and over the row and the column of a 16 x 16 mesh."""
    row = tuple(range(rank - rank % 16, rank - rank % 16 + 16))
    column = tuple(range(rank % 16, NUM_RANKS, 16))
    parties = (EVERYONE, column, row)
    return tuple(step(number, party) for number, party in enumerate(parties * 20)), parties


def meet_all(programs: dict[int, tuple[tuple[Step, ...], tuple[Party, ...]]], timeout_s: float = 60.0):
    """What each rank raised, if anything; seconds; what the ranks asked of the store."""
    shared = dist.HashStore()
    stores = {rank: CountingStore(dist.PrefixStore("default_pg", shared)) for rank in programs}
    everyone_started = Barrier(len(programs))

    def act(rank: int) -> AotdistError | None:
        steps, parties = programs[rank]
        everyone_started.wait()  # on a busy machine 255 threads take more than 3 s to start
        try:
            Meeting(Board(stores[rank], rank), "train_step", steps, parties, timeout_s).hold()
        except AotdistError as error:
            return error
        return None

    start = time.monotonic()
    with ThreadPoolExecutor(len(programs)) as pool:
        raised = dict(zip(programs, pool.map(act, programs), strict=True))
    return raised, time.monotonic() - start, {rank: store.asked for rank, store in stores.items()}


def test_256_ranks_agree_in_three_groups_each():
    raised, seconds, asked = meet_all({rank: program(rank) for rank in EVERYONE})
    assert set(raised.values()) == {None}
    assert seconds < 20
    for rank in (rank for rank in EVERYONE if rank > 15 and rank % 16):  # those that lead nobody
        # Two reports; a seat and an entry in each group. Only its looks for the verdicts come on top.
        assert asked[rank]["set"] + asked[rank]["add"] + asked[rank]["compare_set"] == 2 + 3 * 2


def test_one_of_256_differs():
    programs = {rank: program(rank) for rank in EVERYONE}
    steps, parties = programs[77]
    programs[77] = (*steps[:30], step(-1, EVERYONE), *steps[31:]), parties
    raised, seconds, _ = meet_all(programs)
    assert all(isinstance(error, RankDivergence) for error in raised.values())
    assert "rank 77 are about to run different programs" in str(raised[200])
    assert seconds < 30


def test_one_of_256_never_comes():
    programs = {rank: program(rank) for rank in EVERYONE if rank != 200}
    raised, seconds, _ = meet_all(programs, timeout_s=6.0)
    errors = [*raised.values()]
    assert {type(error) for error in errors} == {RankLost}, errors
    assert all("rank 200 did not come" in str(error) for error in errors), {str(error) for error in errors}
    assert 6 <= seconds < 60


@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_a_refusal_crosses_a_mesh_of_any_number_of_axes(num_axes):
    """On a 2 x .. x 2 mesh two neighbours differ; nobody may start to run without them."""
    num_ranks = 2**num_axes
    programs = {}
    for rank in range(num_ranks):
        parties = tuple(tuple(sorted({rank, rank ^ 1 << axis})) for axis in range(num_axes))
        odd = step(99 if rank == 0 else 98, parties[0])
        programs[rank] = (
            (*(step(axis, party) for axis, party in enumerate(parties)), *[odd] * (rank < 2)),
            parties,
        )
    raised, seconds, _ = meet_all(programs)
    assert all(isinstance(error, RankDivergence) for error in raised.values()), raised
    assert seconds < 30


def test_ranks_agree_when_each_runs_a_different_number_of_groups():
    """A chain, as in a pipeline: rank n meets n - 1 and n + 1, the ends one only."""
    programs = {}
    for rank in range(6):
        parties = tuple(
            party for party in ((rank - 1, rank), (rank, rank + 1)) if 0 <= party[0] and party[1] < 6
        )
        programs[rank] = tuple(step(party[0], party) for party in parties), parties
    raised, _, _ = meet_all(programs)
    assert set(raised.values()) == {None}
