"""Turns a transport's error in a collective into a `RankLost` that names the dead rank.

gloo reports a dead peer on the ranks that are connected to it, by socket address: "Connection closed by
peer [10.0.0.7]:24264". Ranks that are connected to *those* stay blocked until these leave, and then report
them. So a rank whose collective broke posts a notice, probes its peers, and names the processes that are
gone without a notice; a rank that died after it posted one is not the cause.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch.distributed as dist

from aotdist.errors import AotdistError, RankDivergence, RankLost
from aotdist.runtime.ranks.board import Board, StoreGone, first_line, spell
from aotdist.runtime.ranks.failing import addresses, ended_among, leave, leaving_of, say_trouble
from aotdist.runtime.ranks.liveness import Address, dead_among, meet_machines
from aotdist.runtime.ranks.runs import RunCheck

GRACE_S = 3.0
"""Seconds to look for a dead peer: a process that raises takes up to a second to leave."""

_PAUSE_S = 0.1
"""Seconds between two looks."""

_BROKEN_TRANSPORT = re.compile(
    r"Connection (closed|reset|refused)|(Read|Write) error|Broken pipe|Timed out waiting"
    r"|timeout caused|Socket closed|NCCL.*(remote|abort|timeout|timed out|system error)"
)
"""Matches errors of gloo (bare `RuntimeError`s) and NCCL about a peer that is gone or late; not gloo's about
wrong arguments ("enforce fail")."""


@dataclass(frozen=True, slots=True)
class LossWatch:
    """The context around each run of a graph that communicates; made once, entered at each run (0.6 us).

    Leaving by the error of a broken connection raises `RankLost` with the rank to blame; other errors, and
    breaks for which no rank can be blamed, pass unchanged.

    A rank that is blocked behind a survivor is freed when the survivor leaves: let `RankLost` end the
    process. With NCCL an error reaches Python only if NCCL reports one (`TORCH_NCCL_BLOCKING_WAIT=1`, or an
    aborted communicator); otherwise its own watchdog ends the process.

    Args:
        board: this rank's access to the notices.
        label: what runs.
        peers: the ranks whose addresses are still looked up on entering, as some post theirs only later.
        check: the comparison with peers on entering, if there is one.
        grace_s: how long to look for the rank to blame.
        roster: the address of each peer; kept here because the store may die with a rank.

    Raises:
        RankDivergence: on entering, see `RunCheck`; or on leaving, if a peer left because of one.
        RankLost: on leaving, in place of the transport's error, which becomes its cause.
    """

    board: Board
    label: str
    peers: Sequence[int] = ()
    check: RunCheck | None = None
    grace_s: float = GRACE_S
    roster: dict[int, Address] = field(default_factory=dict[int, Address])

    @classmethod
    def of(cls, check: RunCheck) -> LossWatch:
        """The watch around the runs of a graph, with the check before each."""
        grace_s = min(GRACE_S, check.settings.rank_timeout_s)
        return cls(check.board, check.label, check.peers, check, grace_s)

    def __enter__(self) -> None:
        if self.check is not None:
            self.check.before_run()
        if len(self.roster) < len(self.peers):
            with contextlib.suppress(StoreGone):
                self.roster.update(addresses(self.board, self.peers))
                meet_machines(self.roster, turn=self.board.rank)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and _is_broken_transport(error):
            lost = self._explain(error)
            if lost is not None:
                raise lost from error

    def _explain(self, error: BaseException) -> AotdistError | None:
        with contextlib.suppress(StoreGone):
            peers = list(self.roster)
            known = leaving_of(self.board, peers)
            if known is None and (ended := ended_among(self.board, peers)) is not None:
                known = RankDivergence(f"{ended}, and `{self.label}` still runs", stage="runtime")
            if known is not None:
                leave(self.board, known, peers)
                return known
        self._post(error, [])
        deadline = time.monotonic() + self.grace_s
        while not (lost := self._lost()) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        if lost:
            self._post(error, lost)
            return self._dead(lost)
        return self._silent()

    def _lost(self) -> list[int]:
        """Ranks that are gone without a notice that they lost someone, and ranks that others lost."""
        dead = dead_among(self.roster)
        notices = self._notices()
        named = {rank for notice in notices.values() for rank in notice["lost"]}
        return sorted({rank for rank in dead if rank not in notices} | named)

    def _notices(self) -> dict[int, Any]:
        """The notices of peers whose own collectives broke; empty if the store is gone as well."""
        with contextlib.suppress(StoreGone):
            return self.board.said("broken", list(self.roster))
        return {}

    def _post(self, error: BaseException, lost: list[int]) -> None:
        with contextlib.suppress(StoreGone):
            say_trouble(self.board, "broken", {"error": first_line(error), "lost": lost})

    def _dead(self, lost: list[int]) -> RankLost:
        return RankLost(
            f"{spell(lost)} {'was' if len(lost) == 1 else 'were'} lost while `{self.label}` ran: "
            f"{'its process is' if len(lost) == 1 else 'their processes are'} gone",
            stage="runtime",
            fix=f"see what {spell(lost)} printed last and whether the system killed it (memory); then "
            "start again from the last checkpoint (`torchrun --max-restarts` does so by itself)",
        )

    def _silent(self) -> RankLost | None:
        """If no process is gone: blame the ranks whose own collective did not break, if there are any."""
        notices = self._notices()
        silent = [rank for rank in self.roster if rank not in notices]
        if not silent:
            return None
        return RankLost(
            f"{spell(silent)} did not take part in a collective of `{self.label}` in time: the process "
            "was not seen to die, it may be stuck elsewhere or cut off from the network",
            stage="runtime",
            fix="find out where it is (`py-spy dump` shows a hanging Python process); if it is only slow, "
            "give `init_process_group` a longer timeout",
        )


def _is_broken_transport(error: BaseException) -> bool:
    if isinstance(error, dist.DistNetworkError):
        return True
    of_transport = isinstance(error, RuntimeError) and not isinstance(error, AotdistError)
    return of_transport and _BROKEN_TRANSPORT.search(str(error)) is not None
