"""The results of the walk of what a callable can reach (`aotdist.capture.reach`)."""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from aotdist.capture.code import Names
from aotdist.capture.source import Applied, Item, Source, Spot


@dataclass(frozen=True, slots=True)
class Assignable:
    """What a program may change, besides tensors.

    Args:
        owners: objects whose attributes it may reassign, tensors included.
        containers: lists and dictionaries whose items it may reassign.
        wholes: sets and deques.
        classes: classes, each with the attributes that it lacks and that the program may assign.
        variables: variables that it may assign without reading them, existing or not.
    """

    owners: list[tuple[Source, Any]] = field(default_factory=list)
    containers: list[tuple[Source, list[Any] | dict[Any, Any]]] = field(default_factory=list)
    wholes: list[tuple[Source, set[Any] | deque[Any]]] = field(default_factory=list)
    classes: list[tuple[Source, type, set[str]]] = field(default_factory=list)
    variables: list[Source] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reached:
    """What the walk has found; the lists grow during the walk.

    Args:
        modules: outermost modules, each with its place.
        tensors: tensors outside of modules.
        constants: constants with their values; those of modules are not among them.
        identities: functions, modules, classes, and other objects on whose identity the program depends.
        ties: pairs of places at which one object was found; the second is where it was found first.
        assignable: what the program may change.
        generators: random generators of PyTorch.
        python_generators: those of Python and NumPy, from which the program must not draw.
        caches: functions with a cache (`functools.lru_cache`).
        clocks: modules, classes and functions that return the time, by name.
        opaque: objects that are compared by identity only, with their places.
        times: how the program may read the time (`time.time`); set at the end of the walk.
        names: attributes that the code reads, of any object; None if it may read any (`getattr`, `hasattr`),
            and before the end of the walk.
    """

    modules: list[tuple[Source, nn.Module]] = field(default_factory=list)
    tensors: list[tuple[Source, torch.Tensor]] = field(default_factory=list)
    constants: list[tuple[Source, Any]] = field(default_factory=list)
    identities: list[tuple[Source, Any]] = field(default_factory=list)
    ties: list[tuple[Source, Source]] = field(default_factory=list)
    assignable: Assignable = field(default_factory=Assignable)
    generators: list[torch.Generator] = field(default_factory=list)
    python_generators: list[tuple[str, Any]] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    clocks: list[tuple[str, Any]] = field(default_factory=list)
    opaque: list[tuple[Source, Any]] = field(default_factory=list)
    times: tuple[str, ...] = ()
    names: frozenset[str] | None = None

    def after(self, code: EnteredCode) -> Reached:
        """The final result, without what cannot change the program.

        Args:
            code: the names in all code of the program.
        """
        ties = list(self._ties())
        logs = list(self._logs(ties, code.only_appended()))
        return replace(
            self,
            constants=[one for one in self.constants if not any(map(one[0].lies_in, logs))],
            identities=[*self.identities, *self._specialising_objects(code)],
            ties=[tie for tie in ties if not any(map(tie[0].lies_in, logs))],
            times=tuple({how: None for clock in self.clocks for how in asked_of(*clock, code.loaded)}),
            names=None if code.any_name or code.asks else frozenset(code.loaded),
        )

    def _logs(self, ties: Iterable[tuple[Source, Source]], names: Container[str]) -> Iterator[Source]:
        """Lists that the program only appends to, at all of their places; `names` as from `only_appended`."""
        places: dict[int, list[Source]] = {}
        for source, first in ties:
            places.setdefault(id(first), []).append(source)
        for source, held in self.assignable.containers:
            its = (source, *places.get(id(source), ()))
            if isinstance(held, list) and all(name_of(p) in names or name_of_dict(p) in names for p in its):
                yield source

    def _specialising_objects(self, code: EnteredCode) -> Iterator[tuple[Source, Any]]:
        """Opaque objects that calls are specialised on: those that the program does not assign itself.

        Descriptors for which reading the place gives another object are left out.
        """
        for source, value in self.opaque:
            if name_of(source) not in code.stored and source.read_or(None) is value:
                yield source, value

    def _ties(self) -> Iterator[tuple[Source, Source]]:
        """Pairs of different places of the same object, each place once."""
        firsts = {id(first): first for _, first in self.ties}
        spots = {key: first.spot() for key, first in firsts.items()}
        known = set[Spot]()
        for source, first in self.ties:
            if (spot := source.spot()) != spots[id(first)] and spot not in known:
                known.add(spot)
                yield source, first


def constants_but(
    reached: Reached, open_: Container[tuple[int, Any]], inputs: Container[tuple[int, Any]]
) -> Iterator[Source]:
    """The places of constants, without those that may differ from call to call.

    A container with an item that may differ is replaced by its keys and its other items.

    Args:
        reached: has the constants.
        open_: places that may differ, by `Source.spot`.
        inputs: places that hold inputs, likewise.
    """
    for source, _ in reached.constants:
        if source.steps[-1] == Applied(is_tensor) and source.owner().spot() in inputs:
            continue
        if not open_:
            yield source
        elif (whole := source.container()) is not None and source.steps[-1] == Applied(items_of):
            held = whole.read()
            items = [whole.item(key) for key in keys_of(held)]
            kept = [item for item in items if item.spot() not in open_]
            yield from [source] if len(kept) == len(items) else [whole.applied(keys_of, source.path), *kept]
        elif source.spot() not in open_:
            yield source


def is_tensor(value: Any) -> bool:
    """Whether `value` is a tensor; programs may ask that without using the tensor."""
    return isinstance(value, torch.Tensor)


def items_of(container: Any) -> tuple[Any, ...]:
    """The items of a list, tuple or dictionary, as a tuple."""
    return tuple(container.items()) if isinstance(container, Mapping) else tuple(container)


def keys_of(container: Any) -> tuple[Any, ...]:
    """The keys of a dictionary, or the indices of a list or tuple, as a tuple."""
    return tuple(container) if isinstance(container, Mapping) else tuple(range(len(container)))


_ENTRY_POINTS = frozenset({"forward", "__call__", "__wrapped__"})


@dataclass(slots=True)
class EnteredCode:
    """The names in all code that the walk has entered.

    Args:
        names: names of attributes, of any object.
        stored: as in `aotdist.capture.code.Names`, like the next three.
        loaded: attributes that are read.
        appended: variables and attributes that are appended to.
        used: variables and attributes that are used in any other way.
        asks: whether it may test for any attribute (`hasattr`).
        any_name: whether it may read any attribute (`getattr` with a computed name).
    """

    names: set[str] = field(default_factory=lambda: set(_ENTRY_POINTS))
    stored: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    appended: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    asks: bool = False
    any_name: bool = False

    def enter(self, names: Names, *, special: bool) -> None:
        """Add the names in one function.

        Args:
            names: its names.
            special: whether it is a special method. One that may read any attribute is taken to read those of
                its own object only.
        """
        self.names |= names.attributes
        self.loaded |= names.loaded
        self.stored |= names.stored
        self.appended |= names.appended
        self.used |= names.used
        if not special:
            if "hasattr" in names.globals:
                self.asks = True
                self.names |= set(filter(str.isidentifier, names.texts))
            self.any_name |= names.reads_by_computed_name()

    def only_appended(self) -> frozenset[str]:
        """Names of lists that the code appends to and does not use otherwise.

        Items of dictionaries are among them, as `name['key']`.
        """
        if self.any_name:
            return frozenset()
        containers = {name.partition("[")[0] for name in self.used if "[" in name}
        names = (name for name in self.appended if not self.used & {name, name.partition("[")[0]})
        return frozenset(name for name in names if name not in containers)


def name_of(source: Source) -> str:
    """The name by which code refers to a variable or attribute."""
    return source.path.rpartition(".")[2]


def name_of_dict(source: Source) -> str:
    """The name of a container with the key, for the place of an item; empty for other places."""
    match source.steps[-1:]:
        case (Item(key=key),):
            return f"{source.path.removesuffix(f'[{key!r}]').rpartition('.')[2]}[{key!r}]"
        case _:
            return ""


_OF_TIME = frozenset(
    f"{name}{unit}"
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    for unit in ("", "_ns")
)
_OF_DATES = frozenset({"now", "utcnow", "today"})
_FUNCTIONS = frozenset(id(getattr(time, name)) for name in _OF_TIME)
_CLOCKS = _FUNCTIONS | {id(time), id(datetime), id(datetime.datetime)}


def is_clock(value: Any) -> bool:
    """Whether a value is a module, a class or a function that returns the time."""
    return id(value) in _CLOCKS


def asked_of(path: str, clock: Any, loaded: Collection[str]) -> Iterator[str]:
    """The functions by which a program reads the time: `time.time`.

    Args:
        path: the name of the clock in the program.
        clock: a module, a class or a function; see `is_clock`.
        loaded: the attributes that the program reads, of any object.
    """
    if id(clock) in _FUNCTIONS:
        yield path
        return
    asking = _OF_TIME if clock is time else _OF_DATES
    yield from (f"{path}.{name}" for name in sorted(asking.intersection(loaded)))
