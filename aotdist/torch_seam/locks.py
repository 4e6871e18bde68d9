"""Locks that all threads share."""

# pyright: basic
from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

LOCKS: list[threading.RLock] = []
"""All that `process_lock` has made."""


def process_lock() -> threading.RLock:
    """A lock that is never gone."""
    LOCKS.append(threading.RLock())
    return LOCKS[-1]


def is_owned(lock: Any) -> bool:
    """Whether this thread holds a lock; for `threading.RLock` alone."""
    return lock._is_owned()


def free_in_child(locks: Iterable[Any]) -> None:
    """Free, in a process that was forked, the locks that threads hold which it does not have."""
    for lock in locks:
        if not is_owned(lock):
            lock._at_fork_reinit()
