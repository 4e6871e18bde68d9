"""What may not be in a row."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.ranks.scenarios import SCENARIOS, Scenario
from benchmarks.ranks.vocabulary import Row, timeout_s


def faults(row: Row) -> tuple[str, ...]:
    """What ranks saw that they may not: hangs, aborts, other values, and errors that name nothing."""
    scenario = SCENARIOS[row.scenario]
    found = [(rank, fault) for rank in range(len(row.ours)) for fault in _faults(scenario, row, rank)]
    if scenario.kind == "differs" and len({seen.end for seen in row.ours}) > 1:
        found.append((scenario.odd_rank, "another end than its peers"))
    return tuple(f"rank {rank}: {fault}" for rank, fault in found)


def _faults(scenario: Scenario, row: Row, rank: int) -> Iterator[str]:
    seen = row.ours[rank]
    odd = rank == scenario.odd_rank
    if seen.end == "hang" or (
        scenario.kind != "absent" and seen.end != "finished" and seen.seconds >= timeout_s(row.way) - 1
    ):
        yield "hang"
    if seen.was_ended and not (odd and seen.end == scenario.killed_by):
        yield "abort"
    if seen.silent:
        yield f"silent: {seen.silent}"
    is_its_own = odd and scenario.kind in ("leaves", "absent")
    if not is_its_own and not seen.was_ended and seen.end not in ("finished", "hang", *_told(scenario)):
        yield f"ends by {seen.end}"


def _told(scenario: Scenario) -> tuple[str, ...]:
    """What ranks may be told; the odd one may raise what it likes where it leaves."""
    match scenario.kind:
        case "runs":
            return ()
        case "differs":
            return ("RankDivergence",)
        case "leaves" if scenario.killed_by:
            return ("RankLost", "StoreGone") if scenario.hosts_store() else ("RankLost",)
        case "leaves" | "absent":  # a peer that has left in good order runs another program from then on
            return ("RankLost", "RankDivergence")
