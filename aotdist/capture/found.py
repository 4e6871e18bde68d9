"""What a walk through all that a callable can reach has met so far; see `aotdist.capture.reach`."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from aotdist.capture.clocks import asked_of
from aotdist.capture.code import Names
from aotdist.capture.reached import Reached
from aotdist.capture.source import Item, Source, Spot

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

        With `[]` behind the name, names of dictionaries whose lists are.
        """
        if self.any_name:
            return frozenset()
        return frozenset(name for name in self.appended if name.removesuffix("[]") not in self.used)


@dataclass(slots=True)
class Found:
    """What was met; fields that are not explained here are those of `Reached`.

    Args:
        clocks: what tells the time, by name.
        opaque: objects of which only the identity is known, each with its place.
    """

    modules: list[tuple[Source, nn.Module]] = field(default_factory=list)
    tensors: list[tuple[Source, torch.Tensor]] = field(default_factory=list)
    constants: list[tuple[Source, Any]] = field(default_factory=list)
    identities: list[tuple[Source, Any]] = field(default_factory=list)
    again: list[tuple[Source, Source]] = field(default_factory=list)
    owners: list[tuple[Source, Any]] = field(default_factory=list)
    containers: list[tuple[Source, list[Any] | dict[Any, Any]]] = field(default_factory=list)
    wholes: list[tuple[Source, set[Any] | deque[Any]]] = field(default_factory=list)
    assigned: list[Source] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    python_generators: list[tuple[str, Any]] = field(default_factory=list)
    caches: list[Any] = field(default_factory=list)
    clocks: list[tuple[str, Any]] = field(default_factory=list)
    opaque: list[tuple[Source, Any]] = field(default_factory=list)

    def reached(self, code: EnteredCode) -> Reached:
        """All of it, at the end of the walk, without what cannot matter to the program.

        Args:
            code: what the entered code names.
        """
        logs = list(self._logs(code.only_appended()))
        return Reached(
            modules=tuple(self.modules),
            tensors=tuple(self.tensors),
            constants=tuple(one for one in self.constants if not any(map(one[0].lies_in, logs))),
            identities=(*self.identities, *self._specialising_objects(code)),
            again=tuple(self._ties(logs)),
            owners=tuple(self.owners),
            containers=tuple(self.containers),
            wholes=tuple(self.wholes),
            assigned=tuple(self.assigned),
            generators=tuple(self.generators),
            python_generators=tuple(self.python_generators),
            caches=tuple(self.caches),
            clocks=tuple({how: None for clock in self.clocks for how in asked_of(*clock, code.loaded)}),
            names=None if code.any_name or code.asks else frozenset(code.loaded),
        )

    def _logs(self, names: Container[str]) -> Iterator[Source]:
        """Lists that are logs to the program at all of their places; `names` are those of `only_appended`."""
        places: dict[int, list[Source]] = {}
        for source, first in self.again:
            places.setdefault(id(first), []).append(source)
        for source, held in self.containers:
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


def spot_of(source: Source) -> Spot:
    """`Source.spot`; for a root without steps, its identity."""
    return source.spot() if source.steps else (id(source.root), None)


def name_of(source: Source) -> str:
    """The name of the variable or attribute that a place is, as it stands in code."""
    return source.path.rpartition(".")[2]


def name_of_dict(source: Source) -> str:
    """Of an item, the name of what it is an item of, with `[]`; empty for another place."""
    match source.steps[-1:]:
        case (Item(key=key),):
            return f"{source.path.removesuffix(f'[{key!r}]').rpartition('.')[2]}[]"
        case _:
            return ""
