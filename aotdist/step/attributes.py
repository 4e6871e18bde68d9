"""The attributes of an optimizer, and containers and objects in them.

The Python of an optimizer runs only while a step is traced. So it must not change these (a counter would be
incremented once), and what it may read of them is a condition of the compiled program.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.capture.code import is_users_class
from aotdist.capture.constants import is_constant, is_same
from aotdist.capture.source import Source
from aotdist.capture.watched import Watched
from aotdist.errors import UnsupportedProgram

_CONTAINERS = (dict, list, set, deque)
_OF_SCHEDULES = "_opt_called"
"""The attribute of optimizers by which schedules check that the optimizer has stepped."""


def watched_attributes(owner: Any, excluded: Iterable[Any]) -> list[Watched]:
    """The attributes of an object and the containers in them, except those in `excluded`, as they are now."""
    return [watched(path, container, is_same) for path, container in _containers(owner, excluded)]


def watched(path: str, container: Any, same: Callable[[Any, Any], bool] = operator.is_) -> Watched:
    """Watches a container for changes.

    Args:
        path: its place on its owner, for messages.
        container: a dictionary, a list, a set or a deque.
        same: whether an item is the one that was there before.
    """
    place = Source(path, container)
    if isinstance(container, (set, deque)):
        read = functools.partial(tuple[Any, ...], container)
        return Watched(place, container, read(), read, None, same)

    def items() -> Any:
        return container

    def entry(_: int, key: Any) -> Source:
        return place.item(key, _path(path, key))

    return Watched(place, container, container.copy(), items, entry, same)


def layout_of(attributes: Watched, ignored: Collection[int]) -> Hashable:
    """What a step is specialised on: constants in a container and the identities of other objects.

    Args:
        attributes: the container.
        ignored: identities of objects that do not count.
    """
    path, items = attributes.place.path, attributes.before
    if isinstance(items, dict):
        marks = ((_mark(key), _mark(item)) for key, item in items.items() if id(item) not in ignored)
        return path, tuple(mark for mark in marks if mark[0] != (str, _OF_SCHEDULES))
    return path, (frozenset if isinstance(attributes.held, set) else tuple)(map(_mark, items))


@contextlib.contextmanager
def unchanged(
    owner: Any, refusal: Callable[[str], UnsupportedProgram], excluded: Iterable[Any]
) -> Generator[None]:
    """Refuse what changes the attributes of `owner` inside of the context, and put them back.

    Args:
        owner: the object.
        refusal: the error to raise, given the path of what has changed.
        excluded: containers that may change.

    Raises:
        UnsupportedProgram: something has changed.
    """
    attributes = watched_attributes(owner, excluded)
    try:
        yield
        for place, _, _ in (change for each in attributes for change in each.changed()):
            if place.path != _OF_SCHEDULES:
                raise refusal(place.path)
    except BaseException:
        for each in attributes:
            each.undo()
        raise


def methods_of(owner: Any) -> tuple[types.FunctionType, ...]:
    """The user's methods in the class of `owner` and in the classes of objects in its attributes."""
    classes = {type(owner): None}
    for _, value in _containers(owner):
        items = value.values() if isinstance(value, dict) else value
        classes |= {type(item): None for item in items if not _is_apart(item)}
    bases = {base: None for cls in classes for base in cls.__mro__ if is_users_class(base)}
    named = [(name, value) for base in bases for name, value in vars(base).items() if callable(value)]
    functions = [inspect.unwrap(value) for name, value in named if name != "__init__"]
    return tuple(function for function in functions if isinstance(function, types.FunctionType))


def _containers(owner: Any, excluded: Iterable[Any] = ()) -> Iterator[tuple[str, Any]]:
    """The attributes of `owner`, and the containers reached from them, each with its path."""
    seen = set(map(id, excluded))
    waiting: list[tuple[str, Any]] = [("", vars(owner))]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, torch.optim.Optimizer) or is_users_class(type(value)):
            value = getattr(value, "__dict__", None)
        if isinstance(value, _CONTAINERS) and id(value) not in seen:
            seen.add(id(value))
            yield path, value
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(_path(path, key), item) for key, item in items if not _is_apart(item)]


def _mark(value: Any) -> Hashable:
    if is_constant(value):
        return type(value), value
    return type(value) if isinstance(value, _CONTAINERS) else _ThisOne(value)


@dataclass(frozen=True, slots=True, eq=False)
class _ThisOne:
    """An object, compared by identity; it is kept alive so that no other gets its identity."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ThisOne) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _is_apart(value: Any) -> bool:
    """Whether the walk does not enter `value`: it holds nothing of the owner's, or is handled elsewhere."""
    return is_constant(value) or isinstance(value, (torch.Tensor, torch.nn.Module, type))


def _path(path: str, key: Any) -> str:
    if isinstance(key, str):
        return f"{path}.{key}" if path else key
    return f"{path}[{key if isinstance(key, int) else type(key).__name__}]"
