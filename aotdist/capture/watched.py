"""Snapshots of containers, objects and variables that a program may change."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aotdist.capture.source import ABSENT, Source


@dataclass(frozen=True, slots=True)
class Watched:
    """A container, the attributes of an object, or a variable, with a snapshot from before the trace.

    Args:
        place: its place at each call.
        held: the container or object; None for a variable.
        before: the snapshot: a dictionary, a list, a tuple (of a set), or the value of a variable.
        read: returns the current content in the form of `before`.
        entry: the place of an item, by its position and key; None where items have no places.
        is_same: whether a value counts as unchanged.
    """

    place: Source
    held: Any
    before: Any
    read: Callable[[], Any]
    entry: Callable[[int, Any], Source] | None = None
    is_same: Callable[[Any, Any], bool] = operator.is_

    def changed(self) -> Iterator[tuple[Source, Any, Any]]:
        """Place, old value and new value of each change; `ABSENT` stands for a missing value.

        Items that were appended are one place (`Source.items_from`), as is a list that got shorter
        (`Source.whole_list`), or a set.
        """
        before, now = self.before, self.read()
        if self.entry is None:
            if not self._is_whole_same(before, now):
                yield self.place, before, now
        elif are_same(before, now):
            return
        elif isinstance(before, dict):
            yield from self._entries(self.entry, before, now)
        elif len(now) == len(before):
            yield from self._entries(self.entry, dict(enumerate(before)), dict(enumerate(now)))
        elif len(now) > len(before) and all(map(operator.is_, before, now)):
            yield self.place.items_from(len(before)), ABSENT, now[len(before) :]
        else:
            yield self.place.whole_list(), list(before), now

    def _entries(
        self, entry: Callable[[int, Any], Source], before: dict[Any, Any], now: dict[Any, Any]
    ) -> Iterator[tuple[Source, Any, Any]]:
        for position, (key, value) in enumerate(now.items()):
            if not self.is_same(value, then := before.get(key, ABSENT)):
                yield entry(position, key), then, value
        for position, (key, then) in enumerate(before.items()):
            if key not in now:
                yield entry(position, key), then, ABSENT

    def _is_whole_same(self, before: Any, now: Any) -> bool:
        if self.held is None:
            return self.is_same(before, now)
        return len(now) == len(before) and all(map(self.is_same, before, now))

    def undo(self) -> None:
        """Restore the snapshot."""
        if isinstance(self.held, list):
            self.held[:] = self.before
        elif isinstance(self.held, set | deque):
            fill(self.held, self.before)
        else:
            for place, before, _ in list(self.changed()):
                place.write(before)


def are_same(before: Any, now: Any) -> bool:
    """Whether dictionaries or lists hold the same objects; quick, for the thousands in a deep model."""
    if len(before) != len(now) or not all(map(operator.is_, before, now)):
        return False
    return not isinstance(before, dict) or all(map(operator.is_, before.values(), now.values()))


def fill(held: set[Any] | deque[Any], items: Iterable[Any]) -> None:
    """Replace the items of a set or a deque."""
    items = tuple(items)
    held.clear()
    (held.extend if isinstance(held, deque) else held.update)(items)


def assign(values: Sequence[tuple[Source, Any]]) -> Callable[[], None]:
    """Assign values to places, or delete them (`ABSENT`); returns a function that undoes it."""
    before = [(place, place.read_or(ABSENT)) for place, _ in values]
    for place, value in values:
        place.write(value)

    def undo() -> None:
        for place, value in reversed(before):
            place.write(value)

    return undo
