"""How long a rank waits at a table, and what it concludes about those who have not come."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aotdist.runtime.ranks.board import Board, spell
from aotdist.runtime.ranks.failing import deaths_of, failures_of, last_report
from aotdist.runtime.ranks.verdict import Refused

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
