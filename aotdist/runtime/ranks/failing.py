"""A rank that fails tells the others; a rank that waits hears of it; the host of the store leaves last."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from aotdist.errors import AotdistError, RankDivergence, RankLost, UnsupportedProgram
from aotdist.runtime.ranks.board import Board, StoreGone, board_of_this_process, first_line, poll, spell
from aotdist.runtime.ranks.liveness import (
    Address,
    address_of_this_process,
    dead_among,
    is_closed,
    is_hosted_by_a_rank,
    meet_machines,
)
from aotdist.torch_seam.undo import PassesPrograms

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
        board.erase([_refused_key(board.rank, undecided)])
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


def report(board: Board, doing: str) -> None:
    """Say what this rank is doing and where it can be probed; it is at work, so no trouble of it holds."""
    go_on(board)
    address = address_of_this_process(board.store)
    board.post(_status_key(board.rank), {"doing": doing, "address": asdict(address)})


def last_report(board: Board, rank: int) -> str:
    """What a rank last said that it was doing."""
    status = board.read(_status_key(rank))
    said = "has not compiled anything yet" if status is None else f"last reported: {status['doing']}"
    return f"{spell([rank])} {said}"


def addresses(board: Board, ranks: Sequence[int]) -> dict[int, Address]:
    """Where those of the ranks that have reported can be probed."""
    statuses = board.read_each([_status_key(rank) for rank in ranks])
    return {
        rank: Address(**status["address"])
        for rank, status in zip(ranks, statuses, strict=True)
        if status is not None
    }


def failures_of(board: Board, ranks: Sequence[int]) -> dict[int, str]:
    """Those of the ranks that failed to compile and have not tried again, and why."""
    if not board.has([_ALARM]):
        return {}
    notices = board.read_each([_failure_key(rank) for rank in ranks])
    return {rank: notice for rank, notice in zip(ranks, notices, strict=True) if notice is not None}


def refusals_of(board: Board, ranks: Sequence[int], kind: str) -> dict[int, str]:
    """Those of the ranks that run calls of a kind as they were written, and why."""
    notices = board.read_each([_refused_key(rank, kind) for rank in ranks])
    return {rank: notice for rank, notice in zip(ranks, notices, strict=True) if notice is not None}


def present() -> None:
    """Say where this rank can be probed, before it compiles anything: one that dies is missed."""
    board = board_of_this_process()
    with contextlib.suppress(StoreGone):
        if board is not None and not board.has([_status_key(board.rank)]):
            report(board, "nothing compiled yet")


def farewell(board: Board, peers: Iterable[int]) -> None:
    """Before an error leaves this rank: say that it is known here; the store's host stays for its peers.

    Args:
        board: this rank's view of the notices.
        peers: ranks that are to hear of it, too.
    """
    memory = board.memory
    memory.gave_up_at = {key: number for key, (number, _) in memory.runs.items()}
    memory.troubles.add(_heard_key(board.rank))
    board.post(_heard_key(board.rank), True)
    if board.rank != 0 or not is_hosted_by_a_rank(board.store):
        return
    missing = set(peers) - {board.rank}

    def look(waited: float) -> bool | None:
        heard = board.read_each([_heard_key(rank) for rank in sorted(missing)]) if missing else []
        missing.difference_update(
            rank for rank, told in zip(sorted(missing), heard, strict=True) if told is not None
        )
        missing.difference_update(dead_among(addresses(board, sorted(missing))))
        return True if not missing or waited > _FAREWELL_S else None

    poll(look)


def say_leaving(board: Board, error: AotdistError) -> None:
    """Tell all ranks that this one goes no further with them, and why."""
    memory = board.memory
    runs = {key: number for key, (number, _) in memory.runs.items()}
    memory.troubles.add(_leaving_key(board.rank))
    notice = {"diverged": isinstance(error, RankDivergence), "what": error.what, "fix": error.fix}
    board.post(_leaving_key(board.rank), {**notice, "runs": runs})
    board.count(_ALARM)


def leaving_of(board: Board, ranks: Sequence[int]) -> AotdistError | None:
    """Why one of the ranks goes no further, if one does, and for another reason than this rank knows."""
    if not board.has([_ALARM]):
        return None
    known = board.memory.gave_up_at
    for notice in board.read_each([_leaving_key(rank) for rank in ranks]):
        if notice is not None and any(number > known.get(key, 0) for key, number in notice["runs"].items()):
            kind = RankDivergence if notice["diverged"] else RankLost
            return kind(notice["what"], stage="runtime", fix=notice["fix"])
    return None


def say_end(board: Board, what: str) -> None:
    """Tell all ranks that this one's process ends in good order: it will run nothing more."""
    board.post(_ended_key(board.rank), what)


def ended_among(board: Board, ranks: Sequence[int]) -> str | None:
    """What one of the ranks said when it ended in good order, if one did."""
    notices = board.read_each([_ended_key(rank) for rank in ranks])
    return next((notice for notice in notices if notice is not None), None)


def go_on(board: Board) -> None:
    """This rank goes on after an error that it caught: nobody is to leave because of it any more."""
    caught = [key for key in board.memory.troubles if key != _heard_key(board.rank)]
    if caught:
        board.erase(caught)
        board.memory.troubles.difference_update(caught)


def meet_again(board: Board) -> None:
    """This rank has agreed with its peers since it last heard of an error, so all of them have heard of it.

    Until then its notice hangs: one who catches an error may be at work again before the store's host looks,
    which would wait for it.
    """
    heard = _heard_key(board.rank)
    if heard in board.memory.troubles:
        board.erase([heard])
        board.memory.troubles.discard(heard)


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
    board.memory.troubles.add(_failure_key(board.rank))
    reason = f"{type(error).__name__}: {first_line(error)}"
    board.post(_failure_key(board.rank), f"{spell([board.rank])} failed to compile `{label}`: {reason}")
    board.count(_ALARM)


def _say_refused(board: Board, label: str, kind: str, error: UnsupportedProgram) -> None:
    """Tell the peers not to wait: this rank runs its call as it was written."""
    board.memory.failures += 1
    reason = f"{error.what}, at {error.where}" if error.where else error.what
    board.post(_refused_key(board.rank, kind), f"{spell([board.rank])} cannot compile `{label}`: {reason}")


def _ended_key(rank: int) -> str:
    return f"ended/{rank}"


def _heard_key(rank: int) -> str:
    return f"heard/{rank}"


def _leaving_key(rank: int) -> str:
    return f"leaving/{rank}"


def _refused_key(rank: int, kind: str) -> str:
    return f"refused/{rank}/{kind}"


def _failure_key(rank: int) -> str:
    return f"failed/{rank}"


def _status_key(rank: int) -> str:
    return f"status/{rank}"
