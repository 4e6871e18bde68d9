"""Of several threads, one compiles at a time; those that call what is compiled already do not wait for it.

No other thread sees a capture. Stand-ins hang in its modules for its own thread alone
(`torch_seam.own_attributes`), and what it replaces in PyTorch asks which thread calls (`torch_seam.patches`).
What is compiled later (a derivative, a backward without some tangents) takes its turn, too.

Threads of the autograd engine's own never wait: the backwards of all threads share one for each device, also
that of the thread whose turn it is.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import ParamSpec, TypeVar

from aotdist.torch_seam.autograd import in_thread_of_engine
from aotdist.torch_seam.dynamo import dynamo_locks, frames_off
from aotdist.torch_seam.patches import LOCKS, free_in_child, is_owned, process_lock, settle_in_child

P = ParamSpec("P")
R = TypeVar("R")
_compiles = process_lock()


_thread = threading.local()
"""`waited`: whether this thread had to wait for another when it last compiled."""


def alone(compile_it: Callable[P, R]) -> Callable[P, R]:
    """Let a function compile while no other thread does."""

    @functools.wraps(compile_it)
    def taking_turns(*args: P.args, **kwargs: P.kwargs) -> R:
        if in_thread_of_engine():
            return compile_it(*args, **kwargs)
        with ExitStack() as stack:
            # Dynamo calls us with its lock held. It comes first always, or two threads wait for each other.
            locks = () if is_owned(_compiles) else (*dynamo_locks(), _compiles)
            _thread.waited = any([_waits(lock, stack) for lock in locks])
            stack.enter_context(frames_off())
            return compile_it(*args, **kwargs)

    return taking_turns


def waited_for_lock() -> bool:
    """Whether another thread compiled when this one wanted to, so that what it wants may be there by now."""
    return getattr(_thread, "waited", False)


def _waits(lock: threading.RLock, held: ExitStack) -> bool:
    """Whether it took waiting to take `lock`, which is held until the stack is closed."""
    waits = not lock.acquire(blocking=False)
    if waits:
        lock.acquire()
    held.callback(lock.release)
    return waits


def _in_child() -> None:
    """In a process that was forked, nothing is left of what other threads of its parent were at."""
    if _compiles.acquire(blocking=False):
        _compiles.release()
    else:
        gc.enable()  # which the one that compiles had paused
    free_in_child((*LOCKS, *dynamo_locks()))
    settle_in_child()


os.register_at_fork(after_in_child=_in_child)
