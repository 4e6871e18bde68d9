"""How a job ends early: by a signal, between two steps; or by an error, with one message and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType

import torch.distributed as dist

from aotdist.errors import AotdistError, BadSettings, RankLost
from aotdist.launch.parallel import Place
from aotdist.runtime.ranks.board import board_of_this_process
from aotdist.runtime.ranks.failing import addresses, report
from aotdist.runtime.ranks.loss import LossWatch

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2

FIRST_WORD_S = 5.0
"""How long other ranks wait for rank 0 to report an error that all of them probably have.

torchrun ends the others within 0.1 s of rank 0's exit, so they wait this long only if rank 0 has no error.
"""

LAUNCHER_POLL_S = 0.5
"""How often a rank checks that its launcher is alive."""

ORPHAN_S = 30.0
"""How long a rank without its launcher may take to save: as long as torchrun waits after SIGTERM."""


class Interrupted(Exception):
    """The run was asked to stop, and has saved its state.

    Args:
        signal_number: of the signal that asked.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


class StopRequest(ExitStack):
    """Turns the first SIGINT or SIGTERM into a request, which the loop reads between steps.

    A second signal acts at once. torchrun's SIGTERM after another rank's death does not interrupt the report
    of it either; torchrun waits 30 s before it kills.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signal_number: int | None = None

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.callback(signal.signal, number, signal.signal(number, self._receive))
        return self

    def ask(self, number: int) -> None:
        """Acts as a first signal would."""
        if self.signal_number is None:
            self.signal_number = number

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number


@contextmanager
def watching_launcher(stop: StopRequest) -> Generator[None]:
    """Inside, a rank whose torchrun was killed stops as after a signal, and is killed after `ORPHAN_S`.

    torchrun starts each rank in a session of its own, so nothing else ends the ranks.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # no launcher that outlives its ranks
        yield
        return
    ended = threading.Event()
    arguments = (os.getppid(), stop, ended)
    threading.Thread(target=_watch_launcher, args=arguments, name="launcher", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _watch_launcher(launcher: int, stop: StopRequest, ended: threading.Event) -> None:
    while not ended.wait(LAUNCHER_POLL_S):
        if os.getppid() != launcher:
            rank = os.environ.get("RANK")
            say = f"[rank {rank}] its torchrun, process {launcher}, is gone: it saves and ends"
            print(say, file=sys.stderr, flush=True)
            stop.ask(signal.SIGTERM)
            if not ended.wait(ORPHAN_S):
                os.kill(os.getpid(), signal.SIGKILL)
            return


def end(error: BaseException, place: Place, stop: StopRequest) -> int:
    """Report why the job ends and return the exit code; call it before the process group is destroyed.

    The first rank that leaves the group makes collectives of the others fail, with errors that hide the
    cause; so each rank reports before it leaves.
    """
    match error:
        case SystemExit(code=int(code)):
            if code != EXIT_DONE:
                _should_report(place, stop)
            return code
        case KeyboardInterrupt():
            return 128 + signal.SIGINT
        case Interrupted():
            return 128 + error.signal_number
        case BrokenPipeError():  # the reader of the output is gone (`| head`)
            return 128 + signal.SIGPIPE
        case RankLost():
            _say(place, f"RankLost: {error}")  # at once: the lost one may be rank 0
            return EXIT_FAILED
        case AotdistError():
            if _should_report(place, stop):
                _say(place, f"{type(error).__name__}: {error}")
            return EXIT_USAGE if isinstance(error, BadSettings) else EXIT_FAILED
        case _:
            _say(place, "".join(traceback.format_exception(error)))
            return EXIT_FAILED


def _should_report(place: Place, stop: StopRequest) -> bool:
    """Wait for rank 0's report on other ranks; False if the launcher ends the job meanwhile."""
    deadline = time.monotonic() + (FIRST_WORD_S if place.rank else 0.0)
    while stop.signal_number is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return place.rank == 0 or stop.signal_number is None


def _say(place: Place, text: str) -> None:
    prefix = f"[rank {place.rank}] " if place.rank else ""
    lines = (prefix + line for line in text.rstrip().splitlines(keepends=True))
    print("".join(lines), file=sys.stderr, flush=True)


def naming_lost_ranks() -> AbstractContextManager[None]:
    """Inside, a collective that fails because a rank died raises `RankLost` with that rank.

    The runtime does this for compiled graphs; this is for collectives between them (the norm of the
    gradients, the loss) and for a model that is not compiled. A collective itself.
    """
    board = board_of_this_process()
    if board is None:
        return nullcontext()
    report(board, "training")
    dist.barrier()  # all addresses are on the board before they are read
    peers = [rank for rank in range(dist.get_world_size()) if rank != board.rank]
    return LossWatch(board, "train", roster=addresses(board, peers))
