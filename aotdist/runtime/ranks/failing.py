"""A rank that fails tells the others; a rank that waits hears of it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from aotdist.runtime.ranks.board import Board, StoreGone, board_of_this_process, first_line, spell
from aotdist.runtime.ranks.liveness import Address, address_of_this_process, dead_among, meet_machines

_ALARM = "alarm"
"""Counts failures of the whole world, so that a waiting rank asks one question, not one per peer."""


@contextmanager
def failing_together(label: str) -> Generator[None]:
    """Around a compilation: when it raises, every rank that waits for this one in `agree` raises too.

    The failure holds until this rank compiles again, so a rank that catches the error and tries once
    more is welcome. Without peers it does nothing.
    """
    board = board_of_this_process()
    if board is None:
        yield
        return
    report(board, f"compiling `{label}`")
    try:
        yield
    except BaseException as error:  # an interrupted rank leaves its peers waiting as well
        with contextlib.suppress(StoreGone):  # the error itself matters more
            _announce(board, label, error)
        raise


def report(board: Board, doing: str) -> None:
    """Say what this rank is doing and where it can be probed; it is at work, so no trouble of it holds."""
    board.erase(board.memory.troubles)
    board.memory.troubles.clear()
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


def deaths_of(board: Board, suspects: Sequence[int], present: Sequence[int]) -> dict[int, str]:
    """Those of the suspects whose process is gone; ranks that are present vouch for their machines."""
    meet_machines(addresses(board, present), turn=board.rank)
    dead = dead_among(addresses(board, suspects))
    return {rank: f"{spell([rank])} died: its process is gone" for rank in dead}


def _announce(board: Board, label: str, error: BaseException) -> None:
    board.memory.failures += 1
    board.memory.troubles.add(_failure_key(board.rank))
    reason = f"{type(error).__name__}: {first_line(error)}"
    board.post(_failure_key(board.rank), f"{spell([board.rank])} failed to compile `{label}`: {reason}")
    board.count(_ALARM)


def _failure_key(rank: int) -> str:
    return f"failed/{rank}"


def _status_key(rank: int) -> str:
    return f"status/{rank}"
