"""Stretches of time, and sets of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

Stretches: TypeAlias = list[tuple[float, float]]
"""Beginnings and ends, in order, none touching another."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that went on for a while.

    Args:
        name: what went on.
        start: when it began, in microseconds.
        end: when it was over.
        thread: the thread that it went on in.
    """

    name: str
    start: float
    end: float
    thread: int | str = 0

    def holds(self, other: Span) -> bool:
        """Whether `other` began and ended meanwhile."""
        return self.start <= other.start and other.end <= self.end


def stretches(spans: Iterable[Span]) -> Stretches:
    """When at least one of them went on."""
    return _joined((span.start, span.end) for span in spans)


def union(*several: Stretches) -> Stretches:
    """What is in at least one."""
    return _joined(stretch for one in several for stretch in one)


def minus(whole: Stretches, removed: Stretches) -> Stretches:
    """What is in the first, and not in the second."""
    return list(_minus(whole, removed))


def within(one: Stretches, other: Stretches) -> Stretches:
    """What is in both."""
    return minus(one, minus(one, other))


def total(several: Stretches) -> float:
    """How long they are together."""
    return sum(end - start for start, end in several)


def outermost(spans: Iterable[Span]) -> Iterator[Span]:
    """Those that no other on the same thread holds."""
    ends: dict[int | str, float] = {}
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if span.end > ends.get(span.thread, float("-inf")):
            ends[span.thread] = span.end
            yield span


def _joined(pairs: Iterable[tuple[float, float]]) -> Stretches:
    joined: Stretches = []
    for start, end in sorted(pairs):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _minus(whole: Stretches, removed: Stretches) -> Iterator[tuple[float, float]]:
    first = 0
    for start, end in whole:
        while first < len(removed) and removed[first][1] <= start:
            first += 1
        at = first
        while at < len(removed) and removed[at][0] < end:
            if start < removed[at][0]:
                yield start, removed[at][0]
            start = max(start, removed[at][1])
            at += 1
        if start < end:
            yield start, end
