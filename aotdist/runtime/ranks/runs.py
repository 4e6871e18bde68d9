"""Ranks compare what they run before each run: runs of programs that communicate are numbered.

The runs of a *party* (`sequence.py`) have the same numbers on all of its ranks. Before a run a rank posts
its number and a digest of what the program has in common with its peers'; that takes microseconds, and
nobody waits for it. A rank that *checks* then polls until its peers have come as far::

    peer's number   its digest at that number
    smaller         not known yet            poll again: it may be compiling, or be late
    as large        equal                    go on: both run the same
    as large        another                  RankDivergence, on both

A peer that waits for this rank in another party, while this rank waits for it, runs another program as
well. A program over several parties that are in no other is checked once for each of them: if a rank gives
up after the first time, ranks that compare nothing with it must not communicate either.

`Settings.check_ranks` says which runs are checked. The notices are also read by a rank with a new program:
peers that run something else at that number will never come to agree on it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aotdist.errors import AotdistError, RankDivergence, RankLost
from aotdist.passes.collectives import Collective
from aotdist.runtime.ranks.board import (
    Board,
    Party,
    Run,
    StoreGone,
    board_of_this_process,
    party_key,
    poll,
    spell,
)
from aotdist.runtime.ranks.failing import (
    deaths_of,
    ended_among,
    failures_of,
    farewell,
    go_on,
    leave,
    leaving_of,
    say_leaving,
)
from aotdist.runtime.ranks.sequence import (
    Sequenced,
    Step,
    describe_difference,
    digest,
    groups_with_peers,
    parties_of,
    shown_steps,
    steps_of,
    view,
    widest,
)
from aotdist.settings import Settings

log = logging.getLogger(__name__)

Phase = Literal["forward", "backward"]
"""Which graph of a program runs; a program without a backward has a forward."""

_NEVER: Run = (0, ())
"""Number and digests of a rank that has run nothing."""

_KEPT = 4
"""How many digests of its last runs a rank posts: a peer that is behind compares an earlier one."""

_DIGITS = 12
"""Hexadecimal digits of a digest that are compared: 48 bits."""

_FIRST_DOUBT_S, _LONGEST_DOUBT_S = 0.1, 10.0
"""Seconds between two checks whether a peer failed or died: the first, and the limit of its doubling."""

_PROBE_AFTER_S = 0.9
"""Seconds of waiting before peers' processes are probed."""

_SAY_SO_S = 30.0
"""Seconds of waiting after which a rank logs for whom it waits."""

_SHOW_TIMEOUT_S = 2.0
"""Seconds for a peer to show what it is about to run; a peer that does not check is in a collective."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A peer that is about to run something else than this rank.

    Args:
        party: the party in which they differ.
        peer: its rank.
        number: of the run in that party.
    """

    party: Party
    peer: int
    number: int


@dataclass(frozen=True, slots=True)
class RunCheck:
    """The check before each run of one graph of a program.

    Args:
        board: this rank's access to the notices.
        label: the program.
        phase: which of its graphs.
        steps: what the program has in common with its peers'.
        parties: those in which the graph communicates, by their keys.
        digests: of the views of the steps, by the same keys.
        peers: the other ranks of the parties.
        rounds: how many times a run is checked.
        settings: `check_ranks`, and `rank_timeout_s`, after which the process group's own timeout applies.
    """

    board: Board
    label: str
    phase: Phase
    steps: tuple[Step, ...]
    parties: Mapping[str, Party]
    digests: Mapping[str, str]
    peers: tuple[int, ...]
    rounds: int
    settings: Settings

    def before_run(self) -> None:
        """Post a run, and compare it with the peers' if it is one to check.

        Raises:
            RankDivergence: a peer is about to run another program.
            RankLost: a peer failed or died.
        """
        board, memory = self.board, self.board.memory
        now = board_of_this_process()
        if now is None or now.store is not board.store:
            return  # there is a new process group since it was compiled
        if memory.troubles:
            go_on(board)
        memory.forwards += self.phase == "forward"
        every = self.settings.check_every()
        checks = every is not None and memory.forwards % every == 0
        for _ in range(self.rounds):
            self._write_down()
            if checks and (error := self._compare()) is not None:
                leave(board, error, self.peers)
                raise error

    def fault(self) -> Fault | None:
        """A peer that is known to run something else instead of the next run."""
        return self._look(1)[0]

    def gives_up(self, fault: Fault) -> RankDivergence:
        """Post that this rank does not run the next run; returns the error with what both ranks run."""
        self._write_down()
        error = self._error(fault)
        say_leaving(self.board, error)
        return error

    def _write_down(self) -> None:
        memory = self.board.memory
        for key, text in self.digests.items():
            number, recent = memory.runs.get(key, _NEVER)
            memory.runs |= {key: (number + 1, (text, *recent[: _KEPT - 1]))}
        self.board.say("runs", memory.runs)

    def _compare(self) -> AotdistError | None:
        """Wait for the peers; returns the error to raise if one runs something else, or will not come."""
        doubts_at, said = _FIRST_DOUBT_S, False

        def look(waited: float) -> Literal["go on"] | AotdistError | None:
            nonlocal doubts_at, said
            fault, behind = self._look(0)
            if fault is not None:
                return self._error(fault)
            if not behind or waited > self.settings.rank_timeout_s:
                return "go on"
            if waited < doubts_at:
                return None
            doubts_at = waited + min(waited, _LONGEST_DOUBT_S)
            if waited > _SAY_SO_S and not said:
                said = True
                log.warning("waiting for %s before `%s` runs", spell(behind), self.label)
            return self._reason(behind, probes=waited > _PROBE_AFTER_S and self._probes(behind))

        found = poll(look, first_pause_s=0.0)
        return None if found == "go on" else found

    def _look(self, ahead: int) -> tuple[Fault | None, list[int]]:
        """A peer that runs something else, if any, and those that have not come as far."""
        runs = self.board.memory.runs
        found = _records(self.board, self.peers)
        behind: dict[int, Fault] = {}
        for key, mine in self.digests.items():
            number = runs.get(key, _NEVER)[0] + ahead
            for peer in (rank for rank in self.parties[key] if rank != self.board.rank):
                theirs, recent = found[peer].get(key, _NEVER)
                fault = Fault(self.parties[key], peer, number)
                if theirs < number:
                    behind.setdefault(peer, fault)
                elif theirs - number < len(recent) and recent[theirs - number] != mine:
                    return fault, []
        for peer, fault in behind.items():
            # It waits for this rank in another party, as this rank does for it in this one.
            if any(key in runs and theirs > runs[key][0] + ahead for key, (theirs, _) in found[peer].items()):
                return fault, []
        return None, sorted(behind)

    def _reason(self, behind: Sequence[int], *, probes: bool) -> AotdistError | None:
        """The error if peers are known not to come."""
        board = self.board
        if (known := leaving_of(board, self.peers)) is not None:
            return known
        if (ended := ended_among(board, behind)) is not None:
            what = f"{ended}, and {spell([board.rank])} is about to run `{self.label}` ({self.phase})"
            return RankDivergence(what, stage="runtime", fix=_FIX)
        dead = deaths_of(board, behind, []) if probes else {}
        reasons = {**dead, **failures_of(board, list(dead))}  # a rank that only failed may go on
        if not reasons:
            return None
        fix = f"see what {spell(reasons)} printed; `{self.label}` stops here so as not to wait for ever"
        return RankLost("; ".join(reasons.values()), stage="runtime", fix=fix)

    def _probes(self, behind: Sequence[int]) -> bool:
        """Whether this rank is one of the two that probe: unserved ports answer only so many probes."""
        present = [rank for rank in (*self.peers, self.board.rank) if rank not in behind]
        return self.board.rank in sorted(present)[:2]

    def _error(self, fault: Fault) -> RankDivergence:
        board, number = self.board, fault.number
        own, key = shown_steps(view(self.steps, fault.party)), party_key(fault.party)
        board.say("shown", [key, number, f"`{self.label}` ({self.phase})", own])

        def look(waited: float) -> list[Any] | bool | None:
            notice = board.said("shown", [fault.peer]).get(fault.peer)
            if notice is not None and notice[:2] == [key, number]:
                return notice[2:]
            return False if waited > _SHOW_TIMEOUT_S else None

        one, other = sorted((board.rank, fault.peer))
        what = (
            f"{spell([one])} and {spell([other])} are about to run different programs over "
            f"{spell(fault.party)}, as number {number} of those that communicate there: "
        )
        theirs = poll(look)
        if not isinstance(theirs, list):
            what += f"{spell([board.rank])} `{self.label}` ({self.phase}), {spell([fault.peer])} another"
            return RankDivergence(what, stage="runtime", fix=_FIX)
        words = {board.rank: f"`{self.label}` ({self.phase})", fault.peer: theirs[0]}
        what += ", ".join(f"{spell([rank])} {words[rank]}" for rank in sorted(words))
        details = describe_difference(dict(sorted({board.rank: own, fault.peer: theirs[1]}.items())))
        return RankDivergence(f"{what}: {details}" if details else what, stage="runtime", fix=_FIX)


_FIX = (
    "let every rank make the same calls in the same order, backwards too; a branch on the rank number or on "
    "a rank's own data, a step that one rank skips, and loaders of unequal length are the usual causes"
)


def run_check(
    board: Board | None,
    label: str,
    phase: Phase,
    sequence: Iterable[Sequenced],
    run: Iterable[Collective],
    settings: Settings,
) -> RunCheck | None:
    """The check before each run of a graph; None if it has no peers.

    Args:
        board: this rank's access to the notices; None without peers.
        label: the name of the program.
        phase: which of its graphs.
        sequence: what the program has in common with its peers'.
        run: the collectives of the graph.
        settings: how to check.
    """
    held = groups_with_peers() if board is not None else {}
    used = {collective.group for collective in run}
    parties = parties_of(held[name] for name in used if name in held)
    if board is None or not parties:
        return None
    _say_at_the_end(board)
    steps = steps_of(sequence, held)
    texts = {party_key(party): digest(view(steps, party))[:_DIGITS] for party in parties}
    return RunCheck(
        board=board,
        label=label,
        phase=phase,
        steps=steps,
        parties={party_key(party): party for party in parties},
        digests={key: f"{phase[0]}{text}" for key, text in texts.items()},
        peers=tuple(sorted({rank for party in parties for rank in party} - {board.rank})),
        rounds=len(widest(parties)),
        settings=settings,
    )


def _records(board: Board, ranks: Sequence[int]) -> dict[int, Mapping[str, Any]]:
    """The runs that each rank has posted; if all have posted before, by one request to the store."""
    known = board.memory.known
    if known.issuperset(ranks):
        return dict(zip(ranks, board.read_all([f"runs/{rank}" for rank in ranks]), strict=True))
    found = board.said("runs", ranks)
    known.update(found)
    return {rank: found.get(rank, {}) for rank in ranks}


def _say_at_the_end(board: Board) -> None:
    """Let the process post its normal end; once for each process."""
    memory = board.memory
    if memory.says_at_the_end:
        return
    memory.says_at_the_end, ranks = True, range(board.num_ranks)

    def say() -> None:
        if getattr(sys, "last_value", None) is not None:
            return  # it ends by an error
        num_runs = max((number for number, _ in memory.runs.values()), default=0)
        with contextlib.suppress(StoreGone):
            board.say("ended", f"{spell([board.rank])} has ended after {num_runs} runs")
            farewell(board, ranks)

    atexit.register(say)
