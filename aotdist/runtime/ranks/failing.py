"""A rank that fails tells the others; a rank that waits hears of it; the host of the store leaves last."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from aotdist.errors import AotdistError, PassesPrograms, RankDivergence, RankLost, UnsupportedProgram
from aotdist.runtime.ranks.board import Board, StoreGone, board_of_this_process, first_line, poll, spell
from aotdist.runtime.ranks.liveness import (
    Address,
    address_of_this_process,
    dead_among,
    is_closed,
    is_hosted_by_a_rank,
    meet_machines,
)

_ALARM = "alarm"
"""Counts failures of the whole world, so that a waiting rank asks one question, not one per peer."""

_FAREWELL_S = 3.0
"""Seconds for which the host of the store stays for those who have not heard why it leaves."""


@contextmanager
def failing_together(label: str, undecided: str | None = None) -> Generator[None]:
    """Around a compilation: when it raises, every rank that waits for this one in `agree` raises too.

    The failure holds until this rank compiles again, so a rank that catches the error and tries once
    more is welcome. Without peers it does nothing.

    Args:
        label: what is compiled, for messages.
        undecided: its kind, if peers run such calls as they were written where this rank's is refused.
    """
    board = board_of_this_process()
    if board is None:
        yield
        return
    report(board, f"compiling `{label}`")
    if undecided is not None:
        board.unsay([refusal_topic(undecided)])
    try:
        yield
    except PassesPrograms:  # it is compiled anew, or runs as it was written: each rank finds that out
        raise
    except BaseException as error:  # an interrupted rank leaves its peers waiting as well
        with contextlib.suppress(StoreGone):  # the error itself matters more
            if undecided is not None and isinstance(error, UnsupportedProgram):
                _say_refused(board, label, undecided, error)
                raise
            _announce(board, label, error)
            farewell(board, range(board.num_ranks))
        raise


def report(board: Board, doing: str, *, has_met: bool = False) -> None:
    """Say what this rank is doing and where it can be probed; it is at work, so no trouble of it holds.

    Args:
        board: this rank's view of the notices.
        doing: what it is doing.
        has_met: see `go_on`.
    """
    go_on(board, has_met=has_met)
    address = address_of_this_process(board.store)
    board.say("status", {"doing": doing, "address": asdict(address)})


def last_report(board: Board, rank: int) -> str:
    """What a rank last said that it was doing."""
    status = board.said("status", [rank]).get(rank)
    said = "has not compiled anything yet" if status is None else f"last reported: {status['doing']}"
    return f"{spell([rank])} {said}"


def addresses(board: Board, ranks: Sequence[int]) -> dict[int, Address]:
    """Where those of the ranks that have reported can be probed."""
    return {rank: Address(**status["address"]) for rank, status in board.said("status", ranks).items()}


def failures_of(board: Board, ranks: Sequence[int]) -> dict[int, str]:
    """Those of the ranks that failed to compile and have not tried again, and why."""
    return board.said("failed", ranks) if board.has([_ALARM]) else {}


def refusal_topic(kind: str) -> str:
    """The topic on which ranks say that they run calls of a kind as they were written, and why."""
    return f"refused/{kind}"


def present() -> None:
    """Say where this rank can be probed, before it compiles anything: one that dies is missed."""
    board = board_of_this_process()
    with contextlib.suppress(StoreGone):
        if board is not None and not board.said("status", [board.rank]):
            report(board, "nothing compiled yet")


def farewell(board: Board, peers: Iterable[int]) -> None:
    """Before an error leaves this rank: say that it is known here; the store's host stays for its peers.

    Args:
        board: this rank's view of the notices.
        peers: ranks that are to hear of it, too.
    """
    memory = board.memory
    memory.gave_up_at = {key: number for key, (number, _) in memory.runs.items()}
    say_trouble(board, "heard", True)
    if board.rank != 0 or not is_hosted_by_a_rank(board.store):
        return
    missing = set(peers) - {board.rank}

    def look(waited: float) -> bool | None:
        missing.difference_update(board.said("heard", sorted(missing)))
        missing.difference_update(dead_among(addresses(board, sorted(missing))))
        return True if not missing or waited > _FAREWELL_S else None

    poll(look)


def leave(board: Board, error: AotdistError, peers: Iterable[int]) -> None:
    """Before an error leaves this rank that its peers are to leave by, too: tell them."""
    board.memory.failures += 1  # they may have given up on this rank at a table
    with contextlib.suppress(StoreGone):
        say_leaving(board, error)
        farewell(board, peers)


def say_leaving(board: Board, error: AotdistError) -> None:
    """Tell all ranks that this one goes no further with them, and why."""
    runs = {key: number for key, (number, _) in board.memory.runs.items()}
    notice = {"diverged": isinstance(error, RankDivergence), "what": error.what, "fix": error.fix}
    say_trouble(board, "leaving", {**notice, "runs": runs})
    board.count(_ALARM)


def leaving_of(board: Board, ranks: Sequence[int]) -> AotdistError | None:
    """Why one of the ranks goes no further, if one does, and for another reason than this rank knows."""
    if not board.has([_ALARM]):
        return None
    known = board.memory.gave_up_at
    for notice in board.said("leaving", ranks).values():
        if any(number > known.get(key, 0) for key, number in notice["runs"].items()):
            kind = RankDivergence if notice["diverged"] else RankLost
            return kind(notice["what"], stage="runtime", fix=notice["fix"])
    return None


def ended_among(board: Board, ranks: Sequence[int]) -> str | None:
    """What one of the ranks said when it ended in good order, if one did: it will run nothing more."""
    return next(iter(board.said("ended", ranks).values()), None)


def go_on(board: Board, *, has_met: bool = False) -> None:
    """This rank goes on after an error that it caught: nobody is to leave because of it any more.

    Args:
        board: this rank's view of the notices.
        has_met: whether it has agreed with its peers since, so that all of them have heard of the error.
            Until then it says that it has heard: one who catches an error may be at work again before the
            store's host looks, which would wait for it.
    """
    caught = board.memory.troubles - (set() if has_met else {"heard"})
    if caught:
        board.unsay(caught)
        board.memory.troubles -= caught


def deaths_of(board: Board, suspects: Sequence[int], present: Sequence[int]) -> dict[int, str]:
    """Those of the suspects whose process is gone; ranks that are present vouch for their machines."""
    meet_machines(addresses(board, present), turn=board.rank)
    known = addresses(board, suspects)
    reasons = dict.fromkeys(dead_among(known), "died: its process is gone")
    closed = [rank for rank in suspects if rank not in known and is_closed(rank)]
    reasons |= dict.fromkeys(closed, "left before it called `aotdist.compile`: its connection is closed")
    return {rank: f"{spell([rank])} {reason}" for rank, reason in reasons.items()}


def _announce(board: Board, label: str, error: BaseException) -> None:
    board.memory.failures += 1
    reason = f"{type(error).__name__}: {first_line(error)}"
    say_trouble(board, "failed", f"{spell([board.rank])} failed to compile `{label}`: {reason}")
    board.count(_ALARM)


def say_trouble(board: Board, topic: str, notice: object) -> None:
    """Say what holds until this rank goes on."""
    board.memory.troubles.add(topic)
    board.say(topic, notice)


def _say_refused(board: Board, label: str, kind: str, error: UnsupportedProgram) -> None:
    """Tell the peers not to wait: this rank runs its call as it was written."""
    board.memory.failures += 1
    reason = f"{error.what}, at {error.where}" if error.where else error.what
    board.say(refusal_topic(kind), f"{spell([board.rank])} cannot compile `{label}`: {reason}")
