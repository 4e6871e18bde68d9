"""What optimizers hold: state and hyperparameters, each tensor and number with its place, and attributes.

State and hyperparameters stay in the optimizers; a compiled step gets the current ones at each call. The
Python of an optimizer runs only while a step is traced. So it must not change attributes (a counter would be
incremented once), and what it may read of them is a condition of the compiled program.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections import deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from aotdist.capture.code import is_users_class
from aotdist.capture.constants import is_constant, is_number, is_same
from aotdist.capture.source import ABSENT, Item, Source
from aotdist.capture.watched import Watched
from aotdist.errors import UnsupportedProgram

_CONTAINERS = (dict, list, set, deque)
_OF_SCHEDULES = "_opt_called"
"""The attribute of optimizers by which schedules check that the optimizer has stepped."""


@dataclass(frozen=True, slots=True)
class HeldItem:
    """An item of a dictionary, or of a list, that the optimizer holds.

    Args:
        path: as the user would write it, but for the optimizer's name: `state[0.weight].exp_avg`.
        owner: the dictionary or the list.
        key: the item's key, or its position.
        value: what is there.
    """

    path: str
    owner: Any
    key: Any
    value: Any

    def numbers(self) -> tuple[float, ...]:
        """The numbers at this place: one, or those in a tuple (`betas`)."""
        return self.value if isinstance(self.value, tuple) else (self.value,)

    def put(self, *numbers: Any) -> None:
        """Assign new numbers, one for each of `numbers()`."""
        self.owner[self.key] = numbers if isinstance(self.value, tuple) else numbers[0]


@dataclass(frozen=True, slots=True)
class HeldState:
    """What optimizers hold at a call.

    Args:
        roots: `param_groups` and `state` of each optimizer.
        tensors: the tensors, each once.
        numbers: numbers that may differ from call to call.
        layout: everything else, constants and structure: what a step is specialised on.
        containers: every dictionary and list in these.
        attributes: the optimizers' attributes, and containers in them, each with the class of the optimizer.
    """

    roots: tuple[Any, ...] = ()
    tensors: list[HeldItem] = field(default_factory=list["HeldItem"])
    numbers: list[HeldItem] = field(default_factory=list["HeldItem"])
    layout: list[Hashable] = field(default_factory=list[Hashable])
    containers: list[Watched] = field(default_factory=list[Watched])
    attributes: list[tuple[str, Watched]] = field(default_factory=list[tuple[str, Watched]])

    @contextmanager
    def put_back(self) -> Generator[None]:
        """Restore the items of all containers, and all attributes, when the context is left.

        Raises:
            UnsupportedProgram: an attribute was changed in the context.
        """
        try:
            yield
            for cls, attributes in self.attributes:
                for place, _, _ in attributes.changed():
                    if place.path != _OF_SCHEDULES:
                        raise UnsupportedProgram(
                            f"the step of {cls} changes its attribute `{place.path}`",
                            stage="capture",
                            fix="let it keep what changes in `state` or in `param_groups`",
                        )
        finally:
            for watched in (*self.containers, *(attributes for _, attributes in self.attributes)):
                watched.undo()

    def now(self, optimizers: Sequence[torch.optim.Optimizer]) -> HeldState | None:
        """The same with the current numbers; None if anything else has changed.

        Ten times as quick as to look at everything anew (33 us for 75 parameters).
        """
        if any(now is not then for now, then in zip(_roots(optimizers), self.roots, strict=True)):
            return None
        if self.has_grown() or any(True for _, each in self.attributes for _ in each.changed()):
            return None
        numbers = {(id(place.owner), place.key): place for place in self.numbers}
        changes = list(self.changed())
        for item, value in changes:
            place = numbers.get((id(item.owner), item.key))
            if place is None or _type(replace(place, value=value)) != _type(place):
                return None
        if not changes:
            return self
        return replace(
            self,
            numbers=[replace(place, value=place.owner[place.key]) for place in self.numbers],
            containers=[_watched(each.place.path, each.held) for each in self.containers],
        )

    def all_containers(self) -> list[Any]:
        """Every dictionary and list that optimizers hold here."""
        return [*self.roots, *(container.held for container in self.containers)]

    def has_grown(self) -> bool:
        """Whether a container has other keys, or another length, than before."""
        changes = ((each.key, each.value, value) for each, value in self.changed())
        return any(isinstance(key, slice) or old is ABSENT or new is ABSENT for key, old, new in changes)

    def changed(self) -> Iterator[tuple[HeldItem, Any]]:
        """Items that were replaced, each with the new one (`ABSENT` where there is none)."""
        for container in self.containers:
            for place, before, now in container.changed():
                step = place.steps[-1]
                assert isinstance(step, Item), "containers hold items"
                yield HeldItem(place.path, container.held, step.key, before), now


def held_by(
    optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str], varying: Collection[str]
) -> HeldState:
    """What `optimizers` hold.

    Args:
        optimizers: the optimizers.
        names: of parameters, by identity.
        varying: names of hyperparameters that may differ from call to call.
    """
    held, seen = HeldState(_roots(optimizers)), set[int]()
    for at, optimizer in enumerate(optimizers):
        prefix = f"optimizers[{at}]." if len(optimizers) > 1 else ""
        groups = f"{prefix}param_groups"
        held.containers.append(_watched(groups, optimizer.param_groups))
        for position, group in enumerate(optimizer.param_groups):
            path = f"{groups}[{position}]"
            held.layout.append(tuple(map(id, group["params"])))
            held.containers.extend((_watched(path, group), _watched(f"{path}.params", group["params"])))
            for key, value in group.items():
                if key != "params":
                    _visit(held, HeldItem(f"{path}.{key}", group, key, value), seen, varies=key in varying)
        held.containers.append(_watched(f"{prefix}state", optimizer.state))
        named = dict[str, Any]()
        for position, (param, entry) in enumerate(optimizer.state.items()):
            name = names.get(id(param), str(position))
            named[f"{name}, {position}" if name in named else name] = (param, entry)
        for name, (param, entry) in named.items():
            path = f"{prefix}state[{name}]"
            held.layout.append(id(param))
            _visit(held, HeldItem(path, optimizer.state, param, entry), seen, varies=True)
    excluded = held.all_containers()
    for optimizer in optimizers:
        for path, container in _containers(optimizer, excluded):
            held.attributes.append((type(optimizer).__name__, _watched(path, container, is_same)))
    ignored = set(map(id, excluded))
    held.layout.extend(_layout_of(each, ignored) for _, each in held.attributes)
    return held


def hyperparameters(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """The constants in each group, by name."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [{key: value for key, value in group.items() if is_constant(value)} for group in groups]


def _visit(held: HeldState, place: HeldItem, seen: set[int], *, varies: bool) -> None:
    value = place.value
    match value:
        case torch.Tensor():
            held.layout.append((place.key, "tensor"))
            if id(value) not in seen:
                seen.add(id(value))
                held.tensors.append(place)
        case dict() | list():
            items = dict(value if isinstance(value, dict) else enumerate(value))
            held.layout.append((place.path, tuple(items)))
            held.containers.append(_watched(place.path, value))
            for key, item in items.items():
                _visit(held, HeldItem(f"{place.path}.{key}", value, key, item), seen, varies=varies)
        case _ if varies and _is_number(value):
            held.layout.append((place.key, *_type(place)))
            held.numbers.append(place)
        case _:
            held.layout.append((place.key, type(value), value if is_constant(value) else id(value)))


def _roots(optimizers: Sequence[torch.optim.Optimizer]) -> tuple[Any, ...]:
    return tuple(root for optimizer in optimizers for root in (optimizer.param_groups, optimizer.state))


def _type(place: HeldItem) -> tuple[type, ...]:
    return tuple(map(type, place.numbers()))


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_number, value))
    return is_number(value)


def _watched(path: str, container: Any, same: Callable[[Any, Any], bool] = operator.is_) -> Watched:
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


def _layout_of(attributes: Watched, ignored: Collection[int]) -> Hashable:
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
