"""What tells the time: a compiled call would find the time of the capture."""

from __future__ import annotations

import datetime
import time
from collections.abc import Collection, Iterator
from typing import Any

_OF_TIME = frozenset(
    f"{name}{unit}"
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    for unit in ("", "_ns")
)
_OF_DATES = frozenset({"now", "utcnow", "today"})
_FUNCTIONS = frozenset(id(getattr(time, name)) for name in _OF_TIME)


def is_clock(value: Any) -> bool:
    """Whether it is a module, a class or a function that tells the time."""
    return any(value is one for one in (time, datetime, datetime.datetime)) or id(value) in _FUNCTIONS


def asked_of(path: str, clock: Any, loaded: Collection[str]) -> Iterator[str]:
    """How a program asks a clock for the time: `time.time`.

    Args:
        path: how it names the clock.
        clock: the clock.
        loaded: the attributes that it reads, of any object.
    """
    if id(clock) in _FUNCTIONS:
        yield path
        return
    asking = _OF_TIME if clock is time else _OF_DATES
    yield from (f"{path}.{name}" for name in sorted(asking.intersection(loaded)))
