"""A scenario: what one rank does otherwise than the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.ranks.part import Part
from benchmarks.ranks.vocabulary import Kind, StoreHost, Way


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row of the table.

    Args:
        chapter: of the table.
        name: what the odd rank does, or has.
        kind: how it has to end.
        act: what each rank does.
        num_ranks: how many.
        odd_rank: which of them is odd.
        store: who hosts the store that they meet in.
        ways: the backends that run it.
        killed_by: the signal that ends the odd rank, if that is what it does.
    """

    chapter: str
    name: str
    kind: Kind
    act: Callable[[Part], None]
    num_ranks: int = 2
    odd_rank: int = 1
    store: StoreHost = "rank 0"
    ways: tuple[Way, ...] = ("fx",)
    killed_by: str = ""

    def hosts_store(self) -> bool:
        """Whether the odd rank takes the store with it when it leaves."""
        return self.store == "rank 0" and self.odd_rank == 0
