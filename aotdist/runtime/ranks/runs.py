"""Each run of a program that communicates has a number, and ranks compare it before they communicate.

The runs of a *party* (`sequence.py`) are numbered, alike on all of its ranks. Before a run a rank writes down
its number and a digest of what the program has in common with its peers'; that takes microseconds, and nobody
waits for it. A rank that *checks* then looks until its peers have come as far::

    peer's number   its digest at that number
    smaller         not known yet            look again; it may compile, or be late
    as large        equal                    go on: both run the same, or what agrees with it
    as large        another                  RankDivergence, on both

A peer that waits in another party for this rank, while this rank waits for it, has gone another way as well.
A program over several parties that stand in no other is checked as often as there are such: a rank that gives
up after the first time keeps those from communicating that have compared nothing with it.

`Settings.check_ranks` says which runs are checked. What is written down is read by a rank with a new program,
too: peers that run something else at that number will never come to agree on it.
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
    Memory,
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
    steps_from_notice,
    steps_of,
    steps_to_notice,
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
"""Digests of the last runs that a rank shows: a peer that is behind may compare one of these."""

_DIGITS = 12
"""Hexadecimal digits of a digest that are compared: 48 bits."""

_FIRST_DOUBT_S, _LONGEST_DOUBT_S = 0.1, 10.0
"""Seconds between two questions what became of a peer; the pause doubles up to the second."""

_PROBE_AFTER_S = 0.9
"""Seconds of waiting before peers' processes are probed."""

_SAY_SO_S = 30.0
"""Seconds of waiting after which a rank logs for whom it waits."""

_SHOW_TIMEOUT_S = 2.0
"""Seconds for a peer to show what it is about to run; one that checks nothing is in a collective instead."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A peer that is not about to run what this rank is.

    Args:
        party: where they meet.
        peer: its rank.
        number: of the run in that party.
    """

    party: Party
    peer: int
    number: int


@dataclass(frozen=True, slots=True)
class RunCheck:
    """What stands before each run of one graph of a program.

    Args:
        board: this rank's view of the notices.
        label: the program.
        phase: which of its graphs.
        steps: what the program has in common with its peers'.
        parties: those in which the graph communicates, by their keys.
        digests: of the views of the steps, by the same keys.
        peers: the other ranks of the parties.
        rounds: how often a run is checked.
        settings: `check_ranks`, and `rank_timeout_s`, after which the group's own timeout counts.
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
        """Write down a run, and compare it with the peers' if it is one to check.

        Raises:
            RankDivergence: a peer is about to run another program.
            RankLost: a peer failed or died.
        """
        board, memory = self.board, self.board.memory
        now = board_of_this_process()
        if now is None or now.store is not board.store:
            return  # the ranks have met anew since it was compiled
        if memory.troubles:
            go_on(board)
        checks = self._checks(memory)
        for _ in range(self.rounds):
            self._write_down()
            if checks and (error := self._compare()) is not None:
                leave(board, error, self.peers)
                raise error

    def fault(self) -> Fault | None:
        """A peer that is known to run something else in the place of the next run."""
        return self._look(1)[0]

    def gives_up(self, fault: Fault) -> RankDivergence:
        """Tell the peers that the next run is over, and say what either rank is about to run."""
        self._write_down()
        error = self._error(fault)
        say_leaving(self.board, error)
        return error

    def _checks(self, memory: Memory) -> bool:
        if self.phase == "forward":
            memory.forwards += 1
        every = self.settings.check_every()
        return every is not None and memory.forwards % every == 0

    def _write_down(self) -> None:
        memory = self.board.memory
        for key, text in self.digests.items():
            number, recent = memory.runs.get(key, _NEVER)
            memory.runs |= {key: (number + 1, (text, *recent[: _KEPT - 1]))}
        self.board.say("runs", memory.runs)

    def _compare(self) -> AotdistError | None:
        """Wait for the peers; what to raise if one goes another way or will not come."""
        doubts_at, said = _FIRST_DOUBT_S, False

        def look(waited: float) -> Literal["alike"] | AotdistError | None:
            nonlocal doubts_at, said
            fault, behind = self._look(0)
            if fault is not None:
                return self._error(fault)
            if not behind or waited > self.settings.rank_timeout_s:
                return "alike"
            if waited < doubts_at:
                return None
            doubts_at = waited + min(waited, _LONGEST_DOUBT_S)
            if waited > _SAY_SO_S and not said:
                said = True
                log.warning("waiting for %s before `%s` runs", spell(behind), self.label)
            return self._reason(behind, probes=waited > _PROBE_AFTER_S and self._probes(behind))

        found = poll(look, first_pause_s=0.0)
        return None if found == "alike" else found

    def _look(self, ahead: int) -> tuple[Fault | None, list[int]]:
        """A peer that went another way, and those that have not come as far."""
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
        """Why peers will not come, if that is known."""
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
        """Whether this rank is one of two that probe: ports that nobody serves answer some thousand times."""
        present = [rank for rank in (*self.peers, self.board.rank) if rank not in behind]
        return self.board.rank in sorted(present)[:2]

    def _error(self, fault: Fault) -> RankDivergence:
        board, number = self.board, fault.number
        shown, key = steps_to_notice(view(self.steps, fault.party)), party_key(fault.party)
        board.say("shown", [key, number, f"`{self.label}` ({self.phase})", shown])

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
        sides = {board.rank: steps_from_notice(shown), fault.peer: steps_from_notice(theirs[1])}
        details = describe_difference(dict(sorted(sides.items())))
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
    """The check before each run of a graph; None where it has no peers.

    Args:
        board: this rank's view of the notices, if there are any.
        label: the program, as the user knows it.
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
    """What each rank has written down; of ranks that have before, by one question to the store."""
    known = board.memory.known
    if known.issuperset(ranks):
        return dict(zip(ranks, board.read_all([f"runs/{rank}" for rank in ranks]), strict=True))
    found = board.said("runs", ranks)
    known.update(found)
    return {rank: found.get(rank, {}) for rank in ranks}


def _say_at_the_end(board: Board) -> None:
    """Once: when this process ends in good order, its peers hear of it."""
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
