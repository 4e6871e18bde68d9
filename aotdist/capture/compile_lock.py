"""A lock so that one thread compiles at a time; calls of what is compiled already do not wait for it.

Other threads do not see a capture: its stand-ins are in the modules for its own thread alone
(`torch_seam.modules`), and functions that it replaces in PyTorch ask which thread calls
(`torch_seam.patches`). Whatever is compiled later (a derivative, a backward without some tangents) takes the
lock, too.

Threads of the autograd engine never wait: one of them for each device runs the backwards of all threads, that
of the compiling thread included.
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
    """Decorates a function that compiles: only one thread runs such functions at a time."""

    @functools.wraps(compile_it)
    def taking_turns(*args: P.args, **kwargs: P.kwargs) -> R:
        if in_thread_of_engine():
            return compile_it(*args, **kwargs)
        with ExitStack() as stack:
            # Dynamo calls us with its lock held. So its lock is always taken first; else there is a deadlock.
            locks = () if is_owned(_compiles) else (*dynamo_locks(), _compiles)
            _thread.waited = any([_waits(lock, stack) for lock in locks])
            stack.enter_context(frames_off())
            return compile_it(*args, **kwargs)

    return taking_turns


def waited_for_lock() -> bool:
    """Whether this thread waited for another one to compile, which may have compiled what it needs."""
    return getattr(_thread, "waited", False)


def _waits(lock: threading.RLock, held: ExitStack) -> bool:
    """Take `lock` until the stack is closed; returns whether that took waiting."""
    waits = not lock.acquire(blocking=False)
    if waits:
        lock.acquire()
    held.callback(lock.release)
    return waits


def _in_child() -> None:
    """Reset locks and patches in a forked process, which does not have its parent's other threads."""
    if _compiles.acquire(blocking=False):
        _compiles.release()
    else:
        gc.enable()  # the thread that compiles in the parent had paused it
    free_in_child((*LOCKS, *dynamo_locks()))
    settle_in_child()


os.register_at_fork(after_in_child=_in_child)
