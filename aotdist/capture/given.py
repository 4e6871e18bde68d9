"""Lists, dictionaries and objects among the arguments, which a program may change at every call.

A trace is given copies made of stand-ins; their changes are repeated on the caller's at every call. Objects
that the program makes and puts into them are made anew at every call (`aotdist.capture.objects`).
"""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.capture.constants import is_constant, is_leaf, is_same, is_unreadable
from aotdist.capture.instances import GivenObject, is_instance, items_of, slots_of
from aotdist.capture.objects import MadeObject, taken_apart
from aotdist.capture.source import ABSENT, Given, Source
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.symbols import SYMBOLIC, number_kind
from aotdist.torch_seam.trees import pytree


@dataclass(frozen=True, slots=True)
class _Attributes:
    """The `__dict__` of an object, or its slots.

    Args:
        place: the place of the object.
        held: the object.
        in_slots: whether these are its slots.
        before: the attributes before the trace.
    """

    place: Source
    held: Any
    in_slots: bool
    before: Any

    def now(self) -> Any:
        """What is there."""
        return slots_of(self.held) if self.in_slots else getattr(self.held, "__dict__", {})

    def entry(self, name: Any) -> Source:
        """The place of an attribute: in `__dict__`, if there is one, past the class's own `__setattr__`."""
        path = f"{self.place.path}.{name}"
        if self.in_slots:
            return self.place.attribute(name, path)
        return self.place.attribute("__dict__", self.place.path).item(name, path)


@dataclass(frozen=True, slots=True)
class _Items:
    """A list, a deque or a dictionary, or an object whose class is made of one; as for `_Attributes`."""

    place: Source
    held: Any
    before: Any

    def now(self) -> Any:
        """As for `_Attributes`."""
        return self.held.copy() if isinstance(self.held, deque) else items_of(self.held)

    def entry(self, key: Any) -> Source:
        """The place of one of them."""
        return self.place.item(key)


class GivenContainers:
    """The containers and objects that a trace is given, and what was in them.

    Args:
        args: positional arguments of the trace.
        kwargs: the others, by name.
        objects: the objects in these, with their paths.
        apart: whether no container of the caller's is in two places; the trace has a copy in each.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        objects: Sequence[tuple[str, Any]],
        *,
        apart: bool,
    ) -> None:
        self._apart = apart
        self.positions = {id(each): position for position, (_, each) in enumerate(objects)}
        found = [each for position, value in enumerate(args) for each in _watched(_place(position), value)]
        found += [each for name, value in kwargs.items() for each in _watched(_place(name), value)]
        for position, (path, value) in enumerate(objects):
            found += _watched_object(Source("objects", Given("objects")).item(position, path), value)
        self.counted: list[str] = []
        """Paths of the numbers that the program changed to others of their type; `assigned` fills it."""
        # Inner containers first: one may have been taken out of the one that held it.
        self._watched = sorted(found, key=lambda each: -len(each.place.steps))

    def assigned(self, made: dict[int, int]) -> list[tuple[Source, Any]]:
        """Places whose value changed, and the new values.

        Args:
            made: numbers of the objects of the program's own that were taken apart so far, by identity.

        Raises:
            UnsupportedProgram: a list lost items, or was given what no call can repeat; or a container is
                changed while one is in two places.
        """
        if not self._apart:
            self._refuse_changes()
        found: list[tuple[Source, Any]] = []
        for watched in self._watched:
            place, now, before = watched.place, watched.now(), watched.before
            if isinstance(now, list) and len(now) > len(before) and all(map(operator.is_, before, now)):
                grown = place.items_from(len(before))
                found.append((grown, self._checked(grown, now[len(before) :], made)))
                continue
            if isinstance(now, list) and len(now) != len(before):
                raise UnsupportedProgram(
                    f"the list `{place.path}` loses items in the compiled function",
                    stage="capture",
                    fix="return what is left, or take the items out outside",
                )
            if isinstance(now, deque) and len(now) != len(before):
                raise UnsupportedProgram(
                    f"the deque `{place.path}` gets longer or shorter in the compiled function",
                    stage="capture",
                    fix="pass one that is full (`maxlen`), or a list, or return what it is to hold",
                )
            for key, value in list(_entries(now)):
                then = before.get(key, ABSENT) if isinstance(before, dict) else before[key]
                if is_same(value, then):
                    continue
                entry = watched.entry(key)
                found.append((entry, self._checked(entry, value, made)))
                if (kind := number_kind(value)) is not None and type(then) is kind:
                    self.counted.append(entry.path)
        return found

    def changed(self) -> Iterator[str]:
        """Paths of the containers and objects that changed."""
        for watched in self._watched:
            now, before = map(_entries, (watched.now(), watched.before))
            pairs = itertools.zip_longest(now, before, fillvalue=(ABSENT, None))
            if not all(key == known and is_same(value, then) for (key, value), (known, then) in pairs):
                yield watched.place.path

    def _refuse_changes(self) -> None:
        for path in self.changed():
            raise UnsupportedProgram(
                f"`{path}` is changed, and a list or a dictionary is in two places of the arguments",
                stage="capture",
                fix="pass it once, or a copy of it",
            )

    def deleted(self) -> list[Source]:
        """Places in dictionaries and objects that were deleted."""
        return [
            watched.entry(key)
            for watched in self._watched
            if isinstance(watched.before, dict)
            for key in watched.before
            if key not in watched.now()
        ]

    def _checked(self, place: Source, value: Any, made: dict[int, int]) -> Any:
        value = taken_apart(value, (), made, self.positions, anew=True)
        for leaf in pytree.tree_leaves(value, is_leaf=is_leaf):
            known = (torch.Tensor, GivenObject, MadeObject, *SYMBOLIC)
            if not isinstance(leaf, known) and not is_constant(leaf):
                kind = type(leaf).__name__
                raise UnsupportedProgram(
                    f"`{place.path}` is assigned an instance of `{kind}` in the compiled function",
                    stage="capture",
                    fix="assign tensors and constants",
                )
        return value


def are_apart(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether no list or dictionary is in two places of a call's arguments."""
    seen = set[int]()
    pending: list[Any] = [*args, *kwargs.values()]
    while pending:
        value = pending.pop()
        if isinstance(value, (list, dict, deque)):
            if id(value) in seen:
                return False
            seen.add(id(value))
        if isinstance(value, (list, dict, tuple, deque)):
            pending.extend(inner for _, inner in _entries(value))
    return True


def _entries(held: dict[Any, Any] | Sequence[Any]) -> Iterable[tuple[Any, Any]]:
    return held.items() if isinstance(held, dict) else enumerate(held)


def _place(key: int | str) -> Source:
    if isinstance(key, int):
        return Source("args", Given("args")).item(key)
    return Source("kwargs", Given("kwargs")).item(key, key)


def _watched(place: Source, value: Any) -> Iterator[_Attributes | _Items]:
    if is_unreadable(value) or is_instance(value):  # one of the objects
        return
    if isinstance(value, (list, dict, deque)):
        yield _Items(place, value, value.copy())
    elif type(value) in pytree.SUPPORTED_NODES and not isinstance(value, tuple):
        yield from _watched_attributes(place, value)
    if isinstance(value, (list, dict, tuple, deque)):
        for key, inner in _entries(value):
            yield from _watched(place.item(key), inner)


def _watched_object(place: Source, value: Any) -> Iterator[_Attributes | _Items]:
    yield from _watched_attributes(place, value)
    if (items := items_of(value)) is not None:
        yield _Items(place, value, items)
        for key, inner in _entries(items):
            yield from _watched(place.item(key), inner)


def _watched_attributes(place: Source, value: Any) -> Iterator[_Attributes | _Items]:
    for in_slots, attributes in ((False, getattr(value, "__dict__", {})), (True, slots_of(value))):
        watched = _Attributes(place, value, in_slots, dict(attributes))
        yield watched
        for name, inner in attributes.items():
            yield from _watched(watched.entry(name), inner)
