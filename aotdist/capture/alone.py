"""Of several threads, one compiles at a time; calls of others wait while it captures.

While a program is captured, stand-ins hang in its modules, and hooks and patches are in place that the whole
process sees. What is compiled later (a derivative, a backward without some tangents) takes its turn, too.

Threads of the autograd engine's own never wait: the backwards of all threads share one for each device, also
that of the thread whose turn it is.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from aotdist.torch_seam.autograd import in_thread_of_engine
from aotdist.torch_seam.dynamo import dynamo_locks, frames_off

_compiles = threading.RLock()
_captures = threading.RLock()


class Captures:
    """How many captures run, one inside of the other; every compiled call looks here."""

    running = 0


@contextmanager
def alone() -> Generator[bool]:
    """Compile while no other thread does; whether this one had to wait for that."""
    if in_thread_of_engine():
        yield False
        return
    with ExitStack() as held:
        # Dynamo calls us with its lock held. It comes first always, or two threads wait for each other.
        waited = any([_waits(lock, held) for lock in (*dynamo_locks(), _compiles)])
        held.enter_context(frames_off())
        yield waited


def _waits(lock: threading.RLock, held: ExitStack) -> bool:
    """Whether it took waiting to take `lock`, until `held` closes."""
    waits = not lock.acquire(blocking=False)
    if waits:
        lock.acquire()
    held.callback(lock.release)
    return waits


@contextmanager
def capturing() -> Generator[None]:
    """Capture a program, or get ready to; inside of `alone`."""
    if in_thread_of_engine():
        yield
        return
    with _captures:
        Captures.running += 1
        try:
            yield
        finally:
            Captures.running -= 1


def wait_for_captures() -> None:
    """Return when no other thread captures a program."""
    if not in_thread_of_engine():
        with _captures:
            pass
