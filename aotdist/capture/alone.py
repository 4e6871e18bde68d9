"""Of several threads, one compiles at a time; those that call what is compiled already do not wait for it.

No other thread sees a capture. Stand-ins hang in its modules for its own thread alone
(`torch_seam.own_attributes`), and what it replaces in PyTorch asks which thread calls (`torch_seam.patches`).
What is compiled later (a derivative, a backward without some tangents) takes its turn, too.

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


class _Thread(threading.local):
    """Whether this thread compiles."""

    is_alone = False


_thread = _Thread()


@contextmanager
def alone() -> Generator[bool]:
    """Compile while no other thread does; whether this one had to wait for that."""
    if in_thread_of_engine():
        yield False
        return
    with ExitStack() as held:
        if _thread.is_alone:  # with Dynamo's lock, or before there was one
            held.enter_context(frames_off())
            yield False
            return
        # Dynamo calls us with its lock held. It comes first always, or two threads wait for each other.
        waited = any([_waits(lock, held) for lock in (*dynamo_locks(), _compiles)])
        held.enter_context(frames_off())
        _thread.is_alone = True
        held.callback(setattr, _thread, "is_alone", False)
        yield waited


def _waits(lock: threading.RLock, held: ExitStack) -> bool:
    """Whether it took waiting to take `lock`, until `held` closes."""
    waits = not lock.acquire(blocking=False)
    if waits:
        lock.acquire()
    held.callback(lock.release)
    return waits
