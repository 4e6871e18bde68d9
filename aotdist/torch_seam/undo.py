"""What an interrupt, or a fork, must not leave behind: held locks, and changes to the program's objects.

A compilation says how what it changes is undone. Locks that all threads share are never left held, and in a
forked process they are free.
"""

# pyright: basic
from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class PassesPrograms(BaseException):
    """What a trace raises through programs that catch every `Exception`; it is no interrupt."""


class _Here(threading.local):
    """What was said in this thread while it compiles, and the exception that was handled when it began to."""

    def __init__(self) -> None:
        self.noted: list[Callable[[], None]] | None = None
        self.handled: BaseException | None = None


_here = _Here()


def to_undo(undo: Callable[[], None]) -> None:
    """If the compilation of this thread is interrupted, `undo` is called, the last one first.

    To be said before anything is changed. It may be called after the change was undone, and twice.
    """
    if _here.noted is not None:
        _here.noted.append(undo)


@contextmanager
def undoing(undo: Callable[[], None]) -> Generator[None]:
    """`undo` is called when the context is left, and if the compilation is interrupted; see `to_undo`."""
    to_undo(undo)
    try:
        yield
    finally:
        undo()


def note_in(noted: list[Callable[[], None]] | None) -> None:
    """Note what is said in this list from now on, or nowhere."""
    _here.noted, _here.handled = noted, sys.exc_info()[1] if noted is not None else None


def led_to(error: BaseException) -> Iterator[BaseException]:
    """An error of the compilation of this thread, what was handled when it was raised, and so on."""
    before: BaseException | None = error
    while before is not None and before is not _here.handled:
        yield before
        before = before.__context__


def interrupt_behind(error: BaseException) -> BaseException | None:
    """The interrupt that led to an error: contexts that it left open may fail themselves."""
    known = Exception, PassesPrograms
    return next((one for one in led_to(error) if not isinstance(one, known)), None)


def raise_interrupt(error: BaseException) -> None:
    """Raise the interrupt that led to an error, if one did: nobody is to go on as after an error."""
    interrupt = interrupt_behind(error)
    if interrupt is not None and interrupt is not error:
        raise interrupt from None


LOCKS: list[threading.RLock] = []
"""All that `process_lock` has made."""


def process_lock() -> threading.RLock:
    """A lock that is never gone."""
    LOCKS.append(threading.RLock())
    return LOCKS[-1]


def is_owned(lock: Any) -> bool:
    """Whether this thread holds a lock; for `threading.RLock` alone."""
    return lock._is_owned()


def release(locks: Iterable[Any]) -> None:
    """Release those of the locks that this thread holds, however often it took them."""
    for lock in locks:
        while is_owned(lock):
            lock.release()


def free_in_child(locks: Iterable[Any]) -> None:
    """Free, in a process that was forked, the locks that threads hold which it does not have."""
    for lock in locks:
        if not is_owned(lock):
            lock._at_fork_reinit()
