"""Of several threads, one compiles at a time; those that call what is compiled already do not wait for it.

No other thread sees a capture. Stand-ins hang in its modules for its own thread alone
(`torch_seam.own_attributes`), and what it replaces in PyTorch asks which thread calls (`torch_seam.patches`).
What is compiled later (a derivative, a backward without some tangents) takes its turn, too. If a compilation
is interrupted, or the process forked meanwhile, everything is as before it (`torch_seam.interrupts`).

Threads of the autograd engine's own never wait: the backwards of all threads share one for each device, also
that of the thread whose turn it is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from aotdist.torch_seam.autograd import in_thread_of_engine
from aotdist.torch_seam.dynamo import dynamo_locks, frames_off
from aotdist.torch_seam.interrupts import restoring
from aotdist.torch_seam.undo import is_owned, process_lock, release

P = ParamSpec("P")
R = TypeVar("R")
_compiles = process_lock()


_thread = threading.local()
"""`waited`: whether this thread had to wait for another when it last compiled."""


def alone(compile_it: Callable[P, R]) -> Callable[P, R]:
    """Let a function compile while no other thread does.

    No context manager: it would not be left if an interrupt arrived between its methods and the block.
    """

    def frames_apart(*args: P.args, **kwargs: P.kwargs) -> R:
        with frames_off():
            return compile_it(*args, **kwargs)

    @functools.wraps(compile_it)
    def taking_turns(*args: P.args, **kwargs: P.kwargs) -> R:
        if in_thread_of_engine():
            return compile_it(*args, **kwargs)
        run = functools.partial(frames_apart, *args, **kwargs)
        if is_owned(_compiles):
            _thread.waited = False
            return run()
        # Dynamo calls us with its lock held. It comes first always, or two threads wait for each other.
        free = [lock for lock in (*dynamo_locks(), _compiles) if not is_owned(lock)]
        try:
            try:
                _thread.waited = any([_waits(lock) for lock in free])
                return restoring(run)
            finally:
                release(free)
        finally:
            release(free)  # an interrupt may have come first

    return taking_turns


def waited_for_lock() -> bool:
    """Whether another thread compiled when this one wanted to, so that what it wants may be there by now."""
    return getattr(_thread, "waited", False)


def _waits(lock: threading.RLock) -> bool:
    """Whether it took waiting to take `lock`."""
    waits = not lock.acquire(blocking=False)
    if waits:
        lock.acquire()
    return waits
