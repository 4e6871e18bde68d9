"""What an optimizer holds in attributes, and in what hangs on them.

Python runs in the trace alone: what it counts there, in an attribute or in a list, would be counted once,
and what it reads there is what a program is specialised on.
"""

from __future__ import annotations

import contextlib
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
from aotdist.capture.source import ABSENT
from aotdist.errors import UnsupportedProgram

_CONTAINERS = (dict, list, set, deque)
_OF_SCHEDULES = "_opt_called"
"""An attribute of optimizers by which schedules tell that there was a step."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container, or the attributes of an object, and what was in it.

    Args:
        path: where it hangs on its owner; nothing for the owner's own attributes.
        now: the container.
        before: a copy of it.
    """

    path: str
    now: Any
    before: Any

    def changed(self) -> Iterator[str]:
        """Places that hold something else by now; the whole container where others are there."""
        if isinstance(self.now, dict):
            for key in self.now.keys() | self.before.keys():
                if not is_same(self.now.get(key, ABSENT), self.before.get(key, ABSENT)):
                    yield _path(self.path, key)
        elif len(self.now) != len(self.before):
            yield self.path
        elif isinstance(self.now, set):
            if self.now != self.before:
                yield self.path
        else:
            for at, (now, before) in enumerate(zip(self.now, self.before, strict=True)):
                if not is_same(now, before):
                    yield _path(self.path, at)

    def is_as_before(self) -> bool:
        """Whether it holds the very objects that it held."""
        now, before = self.now, self.before
        if len(now) != len(before) or isinstance(now, set):
            return now == before
        if isinstance(now, dict):
            return all(now.get(key, ABSENT) is item for key, item in before.items())
        return all(map(operator.is_, now, before))

    def layout(self, ignored: Collection[int]) -> Hashable:
        """Constants in it, and which objects else, without those `ignored`: what a step is specialised on."""
        items = self.before
        if isinstance(items, dict):
            marks = ((_mark(key), _mark(item)) for key, item in items.items() if id(item) not in ignored)
            return self.path, tuple(mark for mark in marks if mark[0] != (str, _OF_SCHEDULES))
        return self.path, (frozenset if isinstance(items, set) else tuple)(map(_mark, items))


@contextlib.contextmanager
def unchanged(
    owner: Any, refusal: Callable[[str], UnsupportedProgram], apart: Iterable[Any]
) -> Generator[None]:
    """What runs inside leaves the attributes of `owner` as they are, or they are put back.

    Args:
        owner: the object.
        refusal: what to raise, given what has changed.
        apart: containers that may change.

    Raises:
        UnsupportedProgram: something has changed.
    """
    held = containers_of(owner, apart)
    try:
        yield
        for path in (path for container in held for path in container.changed()):
            if path != _OF_SCHEDULES:
                raise refusal(path)
    except BaseException:
        for container in held:
            refill(container.now, container.before)
        raise


def refill(container: Any, items: Any) -> None:
    """Let a list, dictionary, set or deque hold these items, and no others."""
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(items)


def methods_of(owner: Any) -> tuple[types.FunctionType, ...]:
    """The user's functions in the class of `owner`, and in those of what hangs on its attributes."""
    classes = {type(owner): None}
    for _, value in _containers(owner):
        items = value.values() if isinstance(value, dict) else value
        classes |= {type(item): None for item in items if not _is_apart(item)}
    bases = {base: None for cls in classes for base in cls.__mro__ if is_users_class(base)}
    named = [(name, value) for base in bases for name, value in vars(base).items() if callable(value)]
    functions = [inspect.unwrap(value) for name, value in named if name != "__init__"]
    return tuple(function for function in functions if isinstance(function, types.FunctionType))


def _containers(owner: Any, apart: Iterable[Any] = ()) -> Iterator[tuple[str, Any]]:
    """The attributes of `owner`, and containers and attributes that hang on them, each with its path."""
    seen = set(map(id, apart))
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


def containers_of(owner: Any, apart: Iterable[Any]) -> list[Container]:
    """The attributes of an object, and what hangs on them, without the containers that are `apart`."""
    return [Container(path, value, value.copy()) for path, value in _containers(owner, apart)]


def _mark(value: Any) -> Hashable:
    if is_constant(value):
        return type(value), value
    return type(value) if isinstance(value, _CONTAINERS) else _ThisOne(value)


@dataclass(frozen=True, slots=True, eq=False)
class _ThisOne:
    """Equal to itself alone; keeps the object, whose identity another one would have afterwards."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ThisOne) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _is_apart(value: Any) -> bool:
    """Whether what hangs on `value` is not the owner's, or is seen to elsewhere."""
    return is_constant(value) or isinstance(value, (torch.Tensor, torch.nn.Module, type))


def _path(path: str, key: Any) -> str:
    if isinstance(key, str):
        return f"{path}.{key}" if path else key
    return f"{path}[{key if isinstance(key, int) else type(key).__name__}]"
