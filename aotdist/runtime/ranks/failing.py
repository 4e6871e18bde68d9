"""Ranks post their failures, and read those of others while they wait; the host of the store leaves last."""

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
"""Counts failures of all ranks, so that a waiting rank makes one request, not one for each peer."""

_FAREWELL_S = 3.0
"""Seconds that the host of the store waits for ranks that have not read yet why it leaves."""


@contextmanager
def failing_together(
    label: str, undecided: str | None = None, passing: type[BaseException] = PassesPrograms
) -> Generator[None]:
    """A block that compiles: if it raises, every rank that waits for this one in `agree` raises as well.

    The failure holds until this rank compiles again: it may catch the error and try once more. Without
    peers the block does nothing.

    Args:
        label: what is compiled, for messages.
        undecided: its kind, if peers run such calls eagerly where this rank's is refused.
        passing: an error after which this rank goes on by itself, like `PassesPrograms`.
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
    except (PassesPrograms, passing):  # compiled again, or run eagerly: each rank finds that out by itself
        raise
    except BaseException as error:  # peers wait for an interrupted rank as well
        with contextlib.suppress(StoreGone):  # the error itself matters more
            if undecided is not None and isinstance(error, UnsupportedProgram):
                _say_refused(board, label, undecided, error)
                raise
            _announce(board, label, error)
            farewell(board, range(board.num_ranks))
        raise


def report(board: Board, doing: str, *, has_met: bool = False) -> None:
    """Post what this rank is doing and where it can be probed, and delete its earlier failures.

    Args:
        board: this rank's access to the notices.
        doing: what it is doing.
        has_met: see `go_on`.
    """
    go_on(board, has_met=has_met)
    address = address_of_this_process(board.store)
    board.say("status", {"doing": doing, "address": asdict(address)})


def last_report(board: Board, rank: int) -> str:
    """What a rank last posted that it was doing."""
    status = board.said("status", [rank]).get(rank)
    said = "has not compiled anything yet" if status is None else f"last reported: {status['doing']}"
    return f"{spell([rank])} {said}"


def addresses(board: Board, ranks: Sequence[int]) -> dict[int, Address]:
    """The addresses of those ranks that have posted one."""
    return {rank: Address(**status["address"]) for rank, status in board.said("status", ranks).items()}


def failures_of(board: Board, ranks: Sequence[int]) -> dict[int, str]:
    """The ranks that failed to compile and have not tried again, with the reasons."""
    return board.said("failed", ranks) if board.has([_ALARM]) else {}


def refusal_topic(kind: str) -> str:
    """The topic on which ranks post why they run a kind of calls eagerly."""
    return f"refused/{kind}"


def present() -> None:
    """Post where this rank can be probed before it compiles anything, so that its death is noticed."""
    board = board_of_this_process()
    with contextlib.suppress(StoreGone):
        if board is not None and not board.said("status", [board.rank]):
            report(board, "nothing compiled yet")


def farewell(board: Board, peers: Iterable[int]) -> None:
    """Before an error is raised: post that this rank knows of it; the store's host waits for its peers.

    Args:
        board: this rank's access to the notices.
        peers: ranks that must learn of the error, too.
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
    """Before an error is raised that its peers are to raise as well: post it."""
    board.memory.failures += 1  # peers may have given up on this rank at a table
    with contextlib.suppress(StoreGone):
        say_leaving(board, error)
        farewell(board, peers)


def say_leaving(board: Board, error: AotdistError) -> None:
    """Post that this rank does not go on, and why."""
    runs = {key: number for key, (number, _) in board.memory.runs.items()}
    notice = {"diverged": isinstance(error, RankDivergence), "what": error.what, "fix": error.fix}
    say_trouble(board, "leaving", {**notice, "runs": runs})
    board.count(_ALARM)


def leaving_of(board: Board, ranks: Sequence[int]) -> AotdistError | None:
    """The error of a rank that does not go on, if there is one that this rank has not raised yet."""
    if not board.has([_ALARM]):
        return None
    known = board.memory.gave_up_at
    for notice in board.said("leaving", ranks).values():
        if any(number > known.get(key, 0) for key, number in notice["runs"].items()):
            kind = RankDivergence if notice["diverged"] else RankLost
            return kind(notice["what"], stage="runtime", fix=notice["fix"])
    return None


def ended_among(board: Board, ranks: Sequence[int]) -> str | None:
    """The notice of a rank whose process has ended normally, if there is one: it runs nothing more."""
    return next(iter(board.said("ended", ranks).values()), None)


def go_on(board: Board, *, has_met: bool = False) -> None:
    """Delete the failures that this rank posted: it goes on after an error that was caught.

    Args:
        board: this rank's access to the notices.
        has_met: whether it has agreed with its peers since, so that all of them know of the error. Until then
            its notice that it knows stays, as the store's host may still wait for that.
    """
    caught = board.memory.troubles - (set() if has_met else {"heard"})
    if caught:
        board.unsay(caught)
        board.memory.troubles -= caught


def deaths_of(board: Board, suspects: Sequence[int], present: Sequence[int]) -> dict[int, str]:
    """The suspects whose process is gone, with reasons; ranks that are present show that machines answer."""
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
    """Post a failure, which holds until this rank goes on."""
    board.memory.troubles.add(topic)
    board.say(topic, notice)


def _say_refused(board: Board, label: str, kind: str, error: UnsupportedProgram) -> None:
    """Tell the peers not to wait, as this rank runs its call eagerly."""
    board.memory.failures += 1
    reason = f"{error.what}, at {error.where}" if error.where else error.what
    board.say(refusal_topic(kind), f"{spell([board.rank])} cannot compile `{label}`: {reason}")
