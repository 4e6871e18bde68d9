"""What a callable can reach, as the walk (`aotdist.capture.reach`) finds it, and what a call checks."""

from __future__ import annotations

import datetime
import time
from collections import deque
from collections.abc import Collection, Container, Iterator, Mapping
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
        owners: objects whose attributes it may reassign: arguments, and tensors of the user's classes, are
            some.
        containers: lists and dictionaries whose items it may reassign.
        wholes: sets and deques.
        variables: variables, and attributes of classes, that it may assign without reading them, existing or
            not.
    """

    owners: list[tuple[Source, Any]] = field(default_factory=list)
    containers: list[tuple[Source, list[Any] | dict[Any, Any]]] = field(default_factory=list)
    wholes: list[tuple[Source, set[Any] | deque[Any]]] = field(default_factory=list)
    variables: list[Source] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reached:
    """What the walk has found; its lists grow while it goes on.

    Args:
        modules: outermost modules, each with its place.
        tensors: tensors outside of modules.
        constants: constants, with the value that they have now; those of modules are not among them.
        identities: functions, built-in ones too, modules, classes, and other objects on whose identity the
            program depends.
        again: further places of an object that was found before, each with the first place.
        assignable: what the program may change.
        generators: random generators.
        python_generators: those of Python's and NumPy's, which the program may not draw from.
        caches: functions that keep what they return (`functools.lru_cache`).
        clocks: what tells the time, by name.
        opaque: objects of which only the identity is known, each with its place.
        times: what it may read the time by (`time.time`), when the walk is over.
        names: attributes that the code reads, of any object; None if it may read any (`getattr`),
            or ask for any (`hasattr`), and until the walk is over.
    """

    modules: list[tuple[Source, nn.Module]] = field(default_factory=list)
    tensors: list[tuple[Source, torch.Tensor]] = field(default_factory=list)
    constants: list[tuple[Source, Any]] = field(default_factory=list)
    identities: list[tuple[Source, Any]] = field(default_factory=list)
    again: list[tuple[Source, Source]] = field(default_factory=list)
    assignable: Assignable = field(default_factory=Assignable)
    generators: list[torch.Generator] = field(default_factory=list)
    python_generators: list[tuple[str, Any]] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    clocks: list[tuple[str, Any]] = field(default_factory=list)
    opaque: list[tuple[Source, Any]] = field(default_factory=list)
    times: tuple[str, ...] = ()
    names: frozenset[str] | None = None

    def after(self, code: EnteredCode) -> Reached:
        """The same at the end of the walk, without what cannot matter to the program.

        Args:
            code: what the entered code names.
        """
        logs = list(self._logs(code.only_appended()))
        return replace(
            self,
            constants=[one for one in self.constants if not any(map(one[0].lies_in, logs))],
            identities=[*self.identities, *self._specialising_objects(code)],
            again=list(self._ties(logs)),
            times=tuple({how: None for clock in self.clocks for how in asked_of(*clock, code.loaded)}),
            names=None if code.any_name or code.asks else frozenset(code.loaded),
        )

    def _logs(self, names: Container[str]) -> Iterator[Source]:
        """Lists that are logs to the program at all of their places; `names` are those of `only_appended`."""
        places: dict[int, list[Source]] = {}
        for source, first in self.again:
            places.setdefault(id(first), []).append(source)
        for source, held in self.assignable.containers:
            its = (source, *places.get(id(source), ()))
            if isinstance(held, list) and all(name_of(p) in names or name_of_dict(p) in names for p in its):
                yield source

    def _specialising_objects(self, code: EnteredCode) -> Iterator[tuple[Source, Any]]:
        """Opaque objects that are part of the signature: not those that the program itself assigns.

        A descriptor is left out if reading its place gives another object.
        """
        for source, value in self.opaque:
            if name_of(source) not in code.stored and source.read_or(None) is value:
                yield source, value

    def _ties(self, logs: Collection[Source]) -> Iterator[tuple[Source, Source]]:
        """Pairs of places of the same object, each place once, except those in logs."""
        known = set[Spot]()
        for source, first in self.again:
            is_logged = any(source.lies_in(log) or first.lies_in(log) for log in logs)
            if not is_logged and (spot := spot_of(source)) not in known:
                known.add(spot)
                yield source, first


def constants_but(
    reached: Reached, open_: Container[tuple[int, Any]], inputs: Container[tuple[int, Any]]
) -> Iterator[Source]:
    """The places of constants, without those that may differ from call to call.

    Of a container that holds one that may differ, the keys and the other items are constants by themselves.

    Args:
        reached: has the constants.
        open_: places that may differ, by `Source.spot`.
        inputs: places that are known to hold tensors, by the same.
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
    """Whether `value` is a tensor; a program may ask that of a value that it does not compute with."""
    return isinstance(value, torch.Tensor)


def items_of(container: Any) -> tuple[Any, ...]:
    """What a list, tuple or dictionary holds, as a tuple."""
    return tuple(container.items()) if isinstance(container, Mapping) else tuple(container)


def keys_of(container: Any) -> tuple[Any, ...]:
    """The keys of a dictionary, or the indices of a list or tuple, as a tuple."""
    return tuple(container) if isinstance(container, Mapping) else tuple(range(len(container)))


_ENTRY_POINTS = frozenset({"forward", "__call__", "__wrapped__"})


@dataclass(slots=True)
class EnteredCode:
    """What the code that was entered names.

    Args:
        names: names of attributes, of whatever object.
        stored: attributes that it assigns; as in `aotdist.capture.code.Names`, as are the next three.
        loaded: attributes that it reads.
        appended: variables and attributes to whose lists it appends.
        used: variables and attributes that it reads for something else.
        asks: whether it may ask for any attribute (`hasattr`).
        any_name: whether it may read any attribute (`getattr` by a computed name).
    """

    names: set[str] = field(default_factory=lambda: set(_ENTRY_POINTS))
    stored: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    appended: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)
    asks: bool = False
    any_name: bool = False

    def enter(self, names: Names, *, special: bool) -> None:
        """Note what one function names.

        Args:
            names: its names.
            special: whether it is a special method. If it may read any attribute, all attributes of its
                object count, but not those of others.
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
        """Names of lists that are logs to it: it appends to them, and does nothing else.

        With a key behind the name, items of dictionaries that are logs.
        """
        if self.any_name:
            return frozenset()
        containers = {name.partition("[")[0] for name in self.used if "[" in name}
        names = (name for name in self.appended if not self.used & {name, name.partition("[")[0]})
        return frozenset(name for name in names if name not in containers)


def spot_of(source: Source) -> Spot:
    """`Source.spot`; for a root without steps, its identity."""
    return source.spot() if source.steps else (id(source.root), None)


def name_of(source: Source) -> str:
    """The name of the variable or attribute that a place is, as it stands in code."""
    return source.path.rpartition(".")[2]


def name_of_dict(source: Source) -> str:
    """Of an item, the name of what it is an item of, with the key; empty for another place."""
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
