"""Changes that a program makes to lists, dictionaries and objects among its arguments.

The trace gets copies that hold stand-ins. What it changes in them, each call repeats on the caller's. Objects
that the program makes and puts into them are made anew at every call (`aotdist.capture.instances`).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from aotdist.capture.constants import is_constant, is_leaf, is_same, is_unreadable
from aotdist.capture.instances import ArgumentObject, MadeObject, is_instance, items_of, slots_of, taken_apart
from aotdist.capture.source import ABSENT, Given, Source
from aotdist.capture.watched import Watched
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.symbols import SYMBOLIC, number_kind
from aotdist.torch_seam.trees import pytree


class MutatedArguments:
    """The containers and objects among the arguments of a trace, and what was in them.

    Args:
        args: positional arguments of the trace.
        kwargs: the others, by name.
        objects: the objects in these, with their paths.
        distinct: whether each container of the caller's is in one place; the trace has a copy for each
            place.
    """

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        objects: Sequence[tuple[str, Any]],
        *,
        distinct: bool,
    ) -> None:
        self._distinct = distinct
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
            made: numbers of the objects made by the program that were taken apart so far, by identity.

        Raises:
            UnsupportedProgram: a list lost items, or got one that no call can make; or a container was
                changed while one is in two places.
        """
        if not self._distinct:
            self._refuse_changes()
        found: list[tuple[Source, Any]] = []
        for watched in self._watched:
            for place, before, value in watched.changed():
                _refuse_other_length(watched, place)
                if value is not ABSENT:
                    found.append((place, self._checked(place, value, made)))
                if (kind := number_kind(value)) is not None and type(before) is kind:
                    self.counted.append(place.path)
        return found

    def changed(self) -> Iterator[str]:
        """Paths of the containers and objects that changed."""
        return (watched.place.path for watched in self._watched if any(True for _ in watched.changed()))

    def _refuse_changes(self) -> None:
        for path in self.changed():
            raise UnsupportedProgram(
                f"`{path}` is changed, and a list or a dictionary is in two places of the arguments",
                stage="capture",
                fix="pass it once, or a copy of it",
            )

    def deleted(self) -> list[Source]:
        """Places in dictionaries and objects that were deleted."""
        changes = (change for watched in self._watched for change in watched.changed())
        return [place for place, _, value in changes if value is ABSENT]

    def _checked(self, place: Source, value: Any, made: dict[int, int]) -> Any:
        value = taken_apart(value, (), made, self.positions, anew=True)
        for leaf in pytree.tree_leaves(value, is_leaf=is_leaf):
            known = (torch.Tensor, ArgumentObject, MadeObject, *SYMBOLIC)
            if not isinstance(leaf, known) and not is_constant(leaf):
                kind = type(leaf).__name__
                raise UnsupportedProgram(
                    f"`{place.path}` is assigned an instance of `{kind}` in the compiled function",
                    stage="capture",
                    fix="assign tensors and constants",
                )
        return value


def _refuse_other_length(watched: Watched, place: Source) -> None:
    """Refuse a list that lost items, and a deque that lost or got some."""
    if isinstance(watched.held, deque) and (place.is_grown_list or place.is_whole_list):
        raise UnsupportedProgram(
            f"the deque `{watched.place.path}` gets longer or shorter in the compiled function",
            stage="capture",
            fix="pass one that is full (`maxlen`), or a list, or return what it is to hold",
        )
    if place.is_whole_list:
        raise UnsupportedProgram(
            f"the list `{watched.place.path}` loses items in the compiled function",
            stage="capture",
            fix="return what is left, or take the items out outside",
        )


def are_distinct(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
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


def _watched(place: Source, value: Any) -> Iterator[Watched]:
    if is_unreadable(value) or is_instance(value):  # one of the objects
        return
    if isinstance(value, (list, dict, deque)):
        yield _items(place, value)
    elif type(value) in pytree.SUPPORTED_NODES and not isinstance(value, tuple):
        yield from _watched_attributes(place, value)
    if isinstance(value, (list, dict, tuple, deque)):
        for key, inner in _entries(value):
            yield from _watched(place.item(key), inner)


def _watched_object(place: Source, value: Any) -> Iterator[Watched]:
    yield from _watched_attributes(place, value)
    if (items := items_of(value)) is not None:
        yield _items(place, value)
        for key, inner in _entries(items):
            yield from _watched(place.item(key), inner)


def _items(place: Source, held: Any) -> Watched:
    """The items of a list, a deque or a dictionary, or of an object whose class is made of one."""
    read = functools.partial(list if isinstance(held, deque) else items_of, held)
    return Watched(place, held, read(), read, lambda _, key: place.item(key), is_same)


def _watched_attributes(place: Source, value: Any) -> Iterator[Watched]:
    """The `__dict__` of an object, past the class's own `__setattr__`, and its slots."""

    def named(_: int, name: str) -> Source:
        return place.attribute("__dict__", place.path).item(name, f"{place.path}.{name}")

    def in_slot(_: int, name: str) -> Source:
        return place.attribute(name, f"{place.path}.{name}")

    for read, entry in ((_attributes, named), (slots_of, in_slot)):
        before = dict(read(value))
        yield Watched(place, value, before, functools.partial(read, value), entry, is_same)
        for position, (name, inner) in enumerate(before.items()):
            yield from _watched(entry(position, name), inner)


def _attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})
