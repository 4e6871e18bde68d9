"""How ranks differ in what they compiled: each tells, rank 0 compares.

Ranks that run the same collectives may still have compiled other things: shards of other sizes, another
graph around them, or the same more slowly. Nothing here waits for a collective: what a rank tells hangs in
the store that the ranks met in, and rank 0 takes what it finds there within a few seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aotdist.runtime.ranks import board_of_this_process, poll

_PATIENCE_S = 5.0
"""How long rank 0 waits for what the others tell when they call `explain` themselves."""


@dataclass(frozen=True, slots=True)
class RankDifference:
    """Something that is not the same on all ranks: its name, and its text on each rank."""

    what: str
    values: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Ranks:
    """How an artifact differs from rank to rank.

    Args:
        others: ranks that rank 0 is compared with.
        missing: ranks that did not tell.
        differences: in the order in which rank 0 tells.
    """

    others: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    differences: tuple[RankDifference, ...] = ()


ALONE = Ranks()
"""There are no others."""

Told = Mapping[str, str]
"""What a rank tells of an artifact, by name."""


def compared(told: Mapping[int, Told | None]) -> Ranks:
    """The differences between ranks, of which some may not have told anything."""
    known = {rank: facts for rank, facts in told.items() if facts is not None}
    names = dict.fromkeys(name for facts in known.values() for name in facts)
    rows = {name: {rank: facts.get(name, "not there") for rank, facts in known.items()} for name in names}
    return Ranks(
        others=tuple(rank for rank in known if rank != 0),
        missing=tuple(rank for rank in told if rank not in known),
        differences=tuple(
            RankDifference(name, values) for name, values in rows.items() if len(set(values.values())) > 1
        ),
    )


def meet(told: Sequence[Told]) -> tuple[Ranks, ...] | None:
    """Tell the other ranks of this process's artifacts; on rank 0, compare.

    Returns:
        for each artifact how ranks differ, on rank 0; None on the others.
    """
    board = board_of_this_process()
    if board is None:
        return tuple(ALONE for _ in told)
    place = f"report/{len(told)}"
    board.post(f"{place}/{board.rank}", list(told))
    if board.rank != 0:
        return None
    keys = [f"{place}/{rank}" for rank in range(board.num_ranks)]
    poll(lambda waited: board.has(keys) or waited > _PATIENCE_S or None)
    found = board.read_each(keys)
    return tuple(
        compared({rank: None if notice is None else notice[at] for rank, notice in enumerate(found)})
        for at in range(len(told))
    )
