"""Of all processes that need what is not there, one makes it while the others wait.

A turn is a lock on a file, which the kernel takes back from a process that is gone, however it went. Whoever
has a turn never waits for another one: two that waited for each other would wait for good.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from pathlib import Path

from aotdist.files import OWNER_ONLY

_POLL_S = 0.02
_held = threading.local()


class Turn:
    """The right to make something, until it is released; one that nobody holds any more is released too.

    Args:
        descriptor: of the locked file.
    """

    def __init__(self, descriptor: int) -> None:
        self._close = weakref.finalize(self, _released, descriptor, threading.get_ident())
        _held.count = getattr(_held, "count", 0) + 1

    def release(self) -> None:
        """Let the next one have it. Idempotent."""
        self._close()


def _released(descriptor: int, thread: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has the descriptor as well
    os.close(descriptor)
    if thread == threading.get_ident():
        _held.count -= 1


def turn(file: Path, patience_s: float) -> Turn | None:
    """A turn, after those who came before; None for one who had better not wait.

    Args:
        file: what to lock; made if it is not there, and never removed.
        patience_s: how long to wait.
    """
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, OWNER_ONLY)
    except OSError:
        return None
    deadline = time.monotonic() + (0 if getattr(_held, "count", 0) else patience_s)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
        except OSError:  # a file system without locks
            pass
        else:
            return Turn(descriptor)
        os.close(descriptor)
        return None
