"""Tensors that the program assigns to attributes, variables and items: `self.n = self.n + 1`.

The assignment runs at capture, on stand-ins. It is undone, what was assigned becomes outputs of the
program, and the runtime repeats the assignment at every call.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aotdist.capture.constants import is_constant, same_constant
from aotdist.capture.hidden import hides_traced, is_traced, refusal, shows_traced
from aotdist.capture.reach import Reached
from aotdist.capture.source import Applied, Source
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam import pytree

_ABSENT = object()
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class _Dictionary:
    """A dictionary (attributes, buffers, a user's own) and what it held before the trace.

    Args:
        source: where it is found at each call.
        held: the dictionary.
        before: what it held.
    """

    source: Source
    held: dict[Any, Any]
    before: dict[Any, Any]

    def changed(self) -> Iterator[tuple[Source, Any, Any]]:
        """Place, value before and value now of every entry that is another object now, or gone."""
        for key, value in list(self.held.items()):
            before = self.before.get(key, _ABSENT)
            if value is not before:
                yield self._place(key), before, value
        for key, before in self.before.items():
            if key not in self.held:
                yield self._place(key), before, _ABSENT

    def _place(self, key: Any) -> Source:
        if not isinstance(key, str):
            return self.source.item(key)
        path = self.source.path
        return self.source.item(key, f"{path}.{key}" if path else key)


@dataclass(frozen=True, slots=True)
class _List:
    """A list and what it held before the trace; as for `_Dictionary`."""

    source: Source
    held: list[Any]
    before: list[Any]

    def changed(self) -> Iterator[tuple[Source, Any, Any]]:
        """As for `_Dictionary`.

        Raises:
            UnsupportedProgram: the list has another length, and tensors of the trace in it.
        """
        if len(self.held) != len(self.before):
            self._refuse_growth()
            now = set(map(id, self.held))
            yield from ((self.source, before, _ABSENT) for before in self.before if id(before) not in now)
            return
        for position, (before, value) in enumerate(zip(self.before, list(self.held), strict=True)):
            if value is not before:
                yield self.source.item(position), before, value

    def _refuse_growth(self) -> None:
        if any(map(is_traced, self.held)):
            raise UnsupportedProgram(
                f"the list `{self.source.path}` grows or shrinks by tensors that the program computes",
                stage="capture",
                fix="return them and append outside, or assign to items that are there already",
            )


@dataclass(frozen=True, slots=True)
class _Variable:
    """A closure variable, a global or an attribute, and what it held before the trace."""

    source: Source
    before: Any

    def changed(self) -> Iterator[tuple[Source, Any, Any]]:
        """As for `_Dictionary`."""
        value = _read(self.source)
        if value is not self.before:
            yield self.source, self.before, value


class Reassignments:
    """Snapshots all that the program may assign to, and finds what a traced call assigned.

    Args:
        modules: modules by qualified name; their parameters, buffers, children and attributes are watched.
        reached: closures, globals, objects and containers.
        ruled: modules in which a rule hangs parameters of its own while they are traced; not watched.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], reached: Reached, ruled: Collection[nn.Module]
    ) -> None:
        self._watched: list[_Dictionary | _List | _Variable] = [
            *_of_modules(modules),
            *_of_parameters({path: module for path, module in modules.items() if module not in ruled}),
            *_of_reached(reached),
        ]
        self._existing = [*modules.values(), *(owner for _, owner in reached.owners), *self._before()]
        self.existing = frozenset(map(id, self._existing))
        """Identities of the objects that were there before the trace."""

    def collect(self) -> list[tuple[Source, Any]]:
        """Places that were assigned traced tensors, or containers of some; each is put back as it was.

        Attributes of arguments are among them whatever they were assigned: the next call's are others.

        Raises:
            UnsupportedProgram: a list grew by tensors, what was assigned hides some, or one is gone.
        """
        found: list[tuple[Source, Any]] = []
        for watched in self._watched:
            for place, before, value in watched.changed():
                _refuse_deletion(place.path, before, value)
                self._refuse_hidden(place.path, value)
                if shows_traced(value) or (place.is_of_argument and value is not _ABSENT):
                    found.append((place, value))
                    _put_back(place, before)
        return found

    def side_effects(self) -> list[str]:
        """Places that got another Python value; that happens at capture only."""
        return [
            place.path
            for watched in self._watched
            for place, before, value in watched.changed()
            if is_constant(value) and not same_constant(value, before) and not place.is_of_argument
        ]

    def _before(self) -> Iterator[Any]:
        for watched in self._watched:
            match watched:
                case _Dictionary(before=before):
                    yield from before.values()
                case _List(before=before):
                    yield from before
                case _Variable(before=before):
                    yield before

    def roll_back(self) -> None:
        """Put back everything that was assigned, for the program to run once more."""
        for watched in self._watched:
            if isinstance(watched, _List):
                watched.held[:] = watched.before
                continue
            for place, before, _ in list(watched.changed()):
                _put_back(place, before)

    def undo(self) -> None:
        """Put back everything that holds traced tensors, or held a tensor, after a trace that failed."""
        for watched in self._watched:
            if isinstance(watched, _List) and len(watched.held) != len(watched.before):
                watched.held[:] = watched.before
            for place, before, value in watched.changed():
                is_gone = value is _ABSENT and isinstance(before, torch.Tensor)
                if is_gone or shows_traced(value) or self._hiding(value) or place.is_of_argument:
                    _put_back(place, before)

    @contextmanager
    def nothing_kept(self) -> Generator[None]:
        """Nothing is to hold tensors of a trace any more when the context is left; else all is put back.

        Raises:
            UnsupportedProgram: the backward assigned some.
        """
        try:
            yield
        except BaseException:
            self.undo()
            raise
        for path in self._kept():
            self.undo()
            raise UnsupportedProgram(
                f"the backward (a hook, an autograd function) keeps a tensor that it computes: `{path}` is "
                "assigned it",
                stage="joint",
                fix="keep it outside of the compiled function: let a hook of a result, or of an argument, do "
                "so, or return the tensor and use `retain_grad()`",
            )

    def _kept(self) -> Iterator[str]:
        """Places that hold tensors of the trace."""
        for watched in self._watched:
            if isinstance(watched, _List) and len(watched.held) != len(watched.before):
                values = [(watched.source.path, watched.held)]
            else:
                values = [(place.path, value) for place, _, value in watched.changed()]
            yield from (path for path, value in values if shows_traced(value) or self._hiding(value))

    def _refuse_hidden(self, path: str, value: Any) -> None:
        for hiding in self._hiding(value):
            raise refusal(
                f"`{path}` is assigned a {type(hiding).__name__} that holds tensors which the program "
                "computes",
                "assign the tensors themselves",
            )

    def _hiding(self, value: Any) -> list[Any]:
        """What hides traced tensors: leaves of `value`, or all of it if it shows none."""
        parts = pytree.tree_leaves(value) if shows_traced(value) else [value]
        return [p for p in parts if not isinstance(p, type) and hides_traced(p, self.existing)]


def _refuse_deletion(path: str, before: Any, value: Any) -> None:
    if value is _ABSENT and isinstance(before, torch.Tensor):
        raise UnsupportedProgram(
            f"a tensor is taken out of `{path}`, which eager would not find at the next call",
            stage="capture",
            fix="let it be None instead, or do so outside of the compiled function",
        )


def _of_modules(modules: Mapping[str, nn.Module]) -> Iterator[_Dictionary | _List]:
    for path, module in modules.items():
        for held in (vars(module)["_buffers"], vars(module)["_modules"], vars(module)):
            yield _container(Source(path, held), held)
        for name, value in vars(module).items():
            if name not in _OF_EVERY_MODULE and type(value) in (list, dict):
                yield _container(Source(path, module).attribute(name), value)


def _of_parameters(modules: Mapping[str, nn.Module]) -> Iterator[_Dictionary | _List]:
    for path, module in modules.items():
        held = vars(module)["_parameters"]
        yield _container(Source(path, held), held)


def _of_reached(reached: Reached) -> Iterator[_Dictionary | _List | _Variable]:
    for source, owner in reached.owners:
        yield _container(source.attribute("__dict__", source.path), vars(owner))
    for source, container in reached.containers:
        yield _container(source, container)
    for source, _ in (*reached.tensors, *reached.constants):
        if source.steps and not isinstance(source.steps[-1], Applied):
            yield _Variable(source, source.read())
    yield from (_Variable(source, _read(source)) for source in reached.assigned)


def _container(source: Source, container: list[Any] | dict[Any, Any]) -> _Dictionary | _List:
    """`container`, itself written at each call, unless it is another one each time: one of an argument."""
    place = source if source.is_of_argument else Source(source.path, container)
    if isinstance(container, dict):
        return _Dictionary(place, container, dict(container))
    return _List(place, container, list(container))


def _read(source: Source) -> Any:
    try:
        return source.read()
    except (KeyError, IndexError, AttributeError, TypeError, ValueError):
        return _ABSENT


def _put_back(place: Source, before: Any) -> None:
    """Let `place` be as it was."""
    if before is _ABSENT:
        place.delete()
    else:
        place.write(before)
