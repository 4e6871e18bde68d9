"""What a table can conclude, and how a leader concludes it; how long a rank waits there."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypedDict

from aotdist.runtime.ranks.board import Board, Party, party_named, spell
from aotdist.runtime.ranks.failing import deaths_of, failures_of, last_report


@dataclass(frozen=True, slots=True)
class Agreed:
    """Every rank of the table is about to run the same.

    Args:
        rounds: how many rounds this table holds.
    """

    rounds: int


@dataclass(frozen=True, slots=True)
class Differ:
    """The ranks of a party are about to run different steps.

    Args:
        party: whose views of the steps differ: the table's own, or one that stands in it.
        sides: its ranks by what they are about to run; the most common side first.
    """

    party: Party
    sides: tuple[Party, ...]

    @property
    def witnesses(self) -> tuple[int, int]:
        """The two ranks that show their steps, one of each of the first two sides."""
        return self.sides[0][0], self.sides[1][0]

    def summary(self, label: str) -> str:
        """The fault in one sentence."""
        *most, last = [spell(side) for side in self.sides[:4]]
        return (
            f"{', '.join(most)} and {last} are about to run different programs "
            f"over {spell(self.party)} in `{label}`"
        )


@dataclass(frozen=True, slots=True)
class Refused:
    """A rank gave up on the table.

    Args:
        kind: `diverged` when ranks differ at another table, `lost` when a peer failed or never came,
            `unsupported` when one cannot compile its call, and all run theirs as they were written.
        what: the reason in one sentence.
        fix: what the user can do.
        call: the kind of call that is `unsupported`; who came for another sits down at the next table.
    """

    kind: Literal["diverged", "lost", "unsupported"]
    what: str
    fix: str
    call: str | None = None


Verdict = Agreed | Differ | Refused


class Entry(TypedDict):
    """What a rank lays on the table.

    Args:
        digests: for each of its parties within the table's, the fingerprint of the steps, by party key.
        reach: how many of its tables stand in no other.
        undecided: the kind of call that it came for, if that runs as it was written where a peer refuses it.
    """

    digests: dict[str, str]
    reach: int
    undecided: str | None


def judge(entries: Mapping[int, Entry]) -> Agreed | Differ:
    """Compare the entries of all ranks of a table.

    A party that only some of its ranks know is a difference too: the others run nothing in it.
    """
    for party, sides in _sides(entries):
        if len(sides) > 1:
            ordered = sorted(sides.values(), key=lambda side: (-len(side), side))
            return Differ(party, tuple(tuple(side) for side in ordered))
    return Agreed(max(entry["reach"] for entry in entries.values()))


def _sides(entries: Mapping[int, Entry]) -> Iterator[tuple[Party, dict[str | None, list[int]]]]:
    """Each party that any rank knows, with its ranks by digest; the widest known to the first rank first."""
    for key in dict.fromkeys(key for entry in entries.values() for key in entry["digests"]):
        sides: dict[str | None, list[int]] = {}
        for rank in party_named(key):
            sides.setdefault(entries[rank]["digests"].get(key), []).append(rank)
        yield party_named(key), sides


def verdict_to_notice(verdict: Verdict) -> dict[str, Any]:
    """A verdict as the board holds it."""
    return {"verdict": type(verdict).__name__, **asdict(verdict)}


def verdict_from_notice(notice: dict[str, Any]) -> Verdict:
    """The verdict that `verdict_to_notice` wrote."""
    match notice:
        case {"verdict": "Differ", "party": party, "sides": sides}:
            return Differ(tuple(party), tuple(map(tuple, sides)))
        case {"verdict": name, **fields}:
            return {"Agreed": Agreed, "Refused": Refused}[name](**fields)
        case _:
            raise AssertionError(f"not a verdict: {notice!r}")


log = logging.getLogger(__name__)

_FIRST_DOUBT_S, _LONGEST_DOUBT_S = 0.1, 2.0
"""Seconds between two questions whether peers failed or died; the pause doubles up to the second."""

_PROBE_AFTER_S = 1.0
"""Seconds of waiting before peers' processes are probed, which costs a question for each of them."""

_SAY_SO_S = 10.0
"""Seconds of waiting after which a rank logs for whom it waits."""

_LEADER_FIRST_S = 1.0
"""Seconds that other ranks wait longer than the leader, who knows better who is absent."""

_CAUSE_FIRST_S = 2.0
"""Seconds that each later round is waited for longer: its absent ranks may be waiting in the one before."""

_NAMED = 4
"""Ranks whose last report stands in a message."""


@dataclass(slots=True)
class Patience:
    """One rank's, in one round.

    Args:
        board: where it asks.
        label: what is to be run.
        timeout_s: how long it waits.
        next_doubt_s: when it asks next, in seconds of waiting.
        said: whether it has logged for whom it waits.
    """

    board: Board
    label: str
    timeout_s: float
    next_doubt_s: float = _FIRST_DOUBT_S
    said: bool = False

    def doubts(self, waited: float) -> bool:
        """Whether it is time to ask what became of those who have not come."""
        if waited < min(self.next_doubt_s, self.timeout_s):
            return False
        self.next_doubt_s = waited + min(waited, _LONGEST_DOUBT_S)
        return True

    def refusal(self, entries: Mapping[int, str], waited: float, round_no: int) -> Refused | None:
        """Why not to wait any longer at a table, if there is a reason.

        The leader watches everyone. The others watch the leader; only the second of them probes its
        process, because a port that nobody serves answers a limited number of probes. These two log.

        Args:
            entries: for each rank of the table, leader first, where its entry lies when it has come.
            waited: seconds so far.
            round_no: the round that is held.
        """
        leader, deputy, *_ = entries
        leads = self.board.rank == leader
        grace = _CAUSE_FIRST_S * (round_no - 1) + (0 if leads else _LEADER_FIRST_S)
        if waited >= self.timeout_s + grace:
            return self._too_late(self._absent(entries) or [leader])
        suspects = self._absent(entries) if leads else [leader]
        reasons = failures_of(self.board, suspects)
        if not reasons and waited > _PROBE_AFTER_S and self.board.rank in (leader, deputy):
            present = [rank for rank in entries if rank not in suspects]
            reasons = deaths_of(self.board, suspects, present)
            self._say_so(entries, waited)
        return self._without(reasons) if reasons else None

    def _absent(self, entries: Mapping[int, str]) -> list[int]:
        return [rank for rank, key in entries.items() if not self.board.has([key])]

    def _without(self, reasons: Mapping[int, str]) -> Refused:
        return Refused(
            "lost",
            "; ".join(list(reasons.values())[:_NAMED]),
            f"see what {spell(reasons)} printed; `{self.label}` stops here so as not to wait for ever",
        )

    def _too_late(self, absent: Sequence[int]) -> Refused:
        return Refused(
            "lost",
            f"{spell(absent)} did not come to agree on `{self.label}` within {self.timeout_s:g} s "
            f"({self._reports(absent)})",
            "find out where it is (`py-spy dump` shows a hanging Python process), or raise "
            "`settings.rank_timeout_s` if it compiles for longer than the others; if it "
            "has other collectives than its peers from this call on, give all the same modules and flags",
        )

    def _say_so(self, entries: Mapping[int, str], waited: float) -> None:
        if waited > _SAY_SO_S and not self.said and (absent := self._absent(entries)):
            self.said = True
            reports = self._reports(absent)
            log.warning("waiting for %s to agree on `%s` (%s)", spell(absent), self.label, reports)

    def _reports(self, ranks: Sequence[int]) -> str:
        return "; ".join(last_report(self.board, rank) for rank in ranks[:_NAMED])
