"""Assignments of the program to attributes, variables and items: `self.n = self.n + 1`.

The assignment runs at capture, on stand-ins. It is undone, and every call repeats it. Assigned tensors become
outputs of the program. Assigned constants are those of the capture: an artifact is only for calls that find
what the captured call found.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from aotdist.capture.code import is_users_class
from aotdist.capture.constants import is_constant, is_same
from aotdist.capture.environment import Reached
from aotdist.capture.instances import ArgumentObject, is_instance, taken_apart
from aotdist.capture.leaked_tensors import hides_traced, is_text_of_traced, is_traced, refusal, shows_traced
from aotdist.capture.module_attributes import HOOKS, OF_EVERY_MODULE
from aotdist.capture.source import (
    ABSENT,
    Applied,
    Argument,
    Attribute,
    Held,
    Source,
    Step,
    keeper_of,
    kept_by,
)
from aotdist.capture.watched import Watched, are_same, assign, fill
from aotdist.errors import UnsupportedProgram
from aotdist.sizes import numbers_of_data
from aotdist.torch_seam.modules import own, shared, with_shared
from aotdist.torch_seam.symbols import SYMBOLIC
from aotdist.torch_seam.trees import pytree

_Container: TypeAlias = list[Any] | dict[Any, Any]
_Place: TypeAlias = tuple[tuple[str, Any, tuple[Step, ...]], _Container]
"""A container, and the arguments of its `Source`."""
_ITS_ATTRIBUTES = (Attribute("__dict__"),)


class _Content(NamedTuple):
    """A list or dictionary, and what it held before the trace: 0.5 us each, of 1,500 in a model of 64 layers.

    Args:
        place: the arguments of its `Source`, which is made if it has changed: that takes 5 us.
        held: the container that all threads share.
        before: see `_kept`.
        seen: the same as this thread saw it, with what it has for itself.
    """

    place: tuple[str, Any, tuple[Step, ...]]
    held: _Container
    before: _Container
    seen: _Container

    def has_changed(self) -> bool:
        """Whether its items are others than before the trace."""
        now = own(self.held)
        is_same = type(now) in (list, dict) and are_same(self.seen, now)
        return not (is_same or are_same(self.before, _kept(self.held)))

    def watched(self) -> Watched:
        """The snapshot, with a place where each call finds its own container."""
        (path, root, steps), held = self.place, self.held
        if isinstance(root, Argument):
            place = Source(path, root, steps)
        else:
            is_itself = steps in ((), _ITS_ATTRIBUTES)
            place = Source(path, held if is_itself else Held(Source(path, root, steps), held))
        entry = functools.partial(_item, place, keeper_of(held))
        return Watched(place, held, self.before, functools.partial(_kept, held), entry)


class Assignments:
    """A snapshot of all that the program may assign to; finds what a trace assigned.

    Args:
        modules: modules by qualified name; their parameters, buffers, children and attributes are watched.
        reached: closures, globals, objects and containers.
        ruled: modules whose parameters a module rule replaces during the trace; those are not watched.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], reached: Reached, ruled: Collection[nn.Module]
    ) -> None:
        self._empty, self._contents = _contents([*_of_modules(modules, ruled), *_containers(reached)])
        self._variables = list(_variables(reached))
        self._wholes = [
            Watched(source, held, tuple(held), functools.partial(tuple, held))
            for source, held in reached.assignable.wholes
        ]
        found = reached.assignable
        entered = [*modules.values(), *(held for _, held in (*found.owners, *found.containers))]
        self._entered = frozenset(map(id, entered))
        self._existing = [*entered, *self._before()]
        self.existing = frozenset(map(id, self._existing))
        """Identities of the objects that were there before the trace."""

    def collect(self, positions: Mapping[int, int], made: dict[int, int]) -> list[tuple[Source, Any]]:
        """Places that were assigned traced tensors, or containers of some; their old values are restored.

        Attributes of arguments are among them, whatever they were assigned: the next call has others.

        Args:
            positions: of the objects among the arguments, by identity.
            made: see `taken_apart`.

        Raises:
            UnsupportedProgram: an object that hides tensors was assigned, or a tensor was deleted.
        """
        found: list[tuple[Source, Any]] = []
        for whole in self._wholes:
            _refuse_kept(whole)
        for place, before, value in self._changed():
            _refuse_deletion(place, before, value)
            shown = self._with_objects(value, positions, made)
            self._refuse_hidden(place.path, shown)
            repeats = is_plain(shown) if place.is_whole_list else self._shows_tensors(shown)
            if repeats or shown is not value or (place.is_of_argument and value is not ABSENT):
                found.append((place, shown))
                place.write(before)
        return found

    def _with_objects(self, value: Any, positions: Mapping[int, int], made: dict[int, int]) -> Any:
        """`value`: the arguments' objects are references, and those that the program made are taken apart."""
        new = [leaf for leaf in pytree.tree_leaves(value) if is_instance(leaf)]
        new = [leaf for leaf in new if id(leaf) not in self.existing and id(leaf) not in positions]
        if any(is_users_class(type(leaf)) for leaf in new) or (new and self._hiding(value)):
            return taken_apart(value, self.existing, made, positions)
        return _with_references(value, positions)

    def collect_constants(self) -> tuple[list[tuple[Source, Any]], list[Source]]:
        """Places that were assigned constants or containers of constants, and places that were deleted.

        Their old values are restored.
        """
        assigned: list[tuple[Source, Any]] = []
        deleted: list[Source] = []
        for place, before, value in self.changed_data():
            _refuse_text(place, value)
            if value is ABSENT:
                deleted.append(place)
            elif not is_same(value, before):
                assigned.append((place, value))
            place.write(before)
        return assigned, deleted

    def changed_data(self, *, tensors: bool = False) -> Iterator[tuple[Source, Any, Any]]:
        """Place, old value and new value where constants were assigned, or something was deleted.

        Args:
            tensors: whether tensors of the trace count as constants.
        """
        for place, before, value in self._changed():
            if value is ABSENT or self._is_data(value, tensors=tensors):
                yield place, before, value

    def _changed(self) -> Iterator[tuple[Source, Any, Any]]:
        """Place, old value and new value of all changes; see `Watched.changed`."""
        return (change for watched in self._watched() for change in watched.changed())

    def _watched(self) -> Iterator[Watched]:
        """The containers that hold something else than before, and all variables."""
        yield from _watched(self._contents, self._variables)
        yield from (content.watched() for content in self._empty if own(content.held))

    def side_effects(self) -> list[str]:
        """Places that were assigned an object at capture, which calls will not assign again."""
        wholes = (change for whole in self._wholes for change in whole.changed())
        return [place.path for place, _, _ in (*self._changed(), *wholes) if not place.is_of_argument]

    def _is_data(self, value: Any, *, tensors: bool = False) -> bool:
        """Whether a value is a constant, or a container of constants that the program made."""
        if is_constant(value) or isinstance(value, SYMBOLIC) or (tensors and is_traced(value)):
            return True
        if type(value) not in (list, dict, tuple) or id(value) in self.existing:
            return False
        parts = value.values() if isinstance(value, dict) else value
        return all(self._is_data(part, tensors=tensors) for part in parts)

    def _shows_tensors(self, value: Any) -> bool:
        """Whether a value is a tensor, or a container of tensors that the program made."""
        if not isinstance(value, torch.Tensor) and id(value) in self.existing:
            return False
        has_tensors = any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
        return shows_traced(value) or (has_tensors and is_plain(value))

    def _before(self) -> Iterator[Any]:
        for content in self._contents:
            yield from content.before.values() if isinstance(content.before, dict) else content.before
        yield from (variable.before for variable in self._variables)

    def left(self) -> Callable[[], None] | None:
        """A function that repeats the assignments after `roll_back`; None if there are none."""
        values = [(place, value) for place, _, value in self._changed()]
        wholes = [(whole.held, items) for whole in self._wholes for _, _, items in whole.changed()]

        def bring_back() -> None:
            assign(values)
            for held, items in wholes:
                fill(held, items)

        return bring_back if values or wholes else None

    def moves(self) -> bool:
        """Whether a place was assigned a module, object or container that was found elsewhere."""
        parts = (part for _, _, value in self._changed() for part in (value, *pytree.tree_leaves(value)))
        return any(id(part) in self._entered for part in parts)

    def roll_back(self) -> None:
        """Restore everything, so that the program can run once more."""
        for watched in (*self._wholes, *self._watched()):
            watched.undo()

    def hidden(self) -> Iterator[tuple[str, Any]]:
        """Paths and values of places that were assigned an object that hides tensors of the trace."""
        for place, _, value in self._changed():
            shown = shows_traced(value) and not self._is_data(value, tensors=True)
            if shown or self._hiding(value):
                yield place.path, value

    def _refuse_hidden(self, path: str, value: Any) -> None:
        for hiding in self._hiding(value):
            raise refusal(
                f"`{path}` is assigned a {type(hiding).__name__} that holds tensors which the program "
                "computes, or numbers that it reads off tensors",
                "assign the tensors and numbers themselves",
            )

    def _hiding(self, value: Any) -> list[Any]:
        """Objects that hide traced tensors or numbers: leaves of `value`, or `value` if that shows none."""
        if self._is_data(value, tensors=True):
            return []
        parts = pytree.tree_leaves(value) if shows_traced(value) else [value]
        return [part for part in parts if hides_traced(part, self.existing)]


def _with_references(value: Any, positions: Mapping[int, int]) -> Any:
    """`value` with an `ArgumentObject` in the place of each object among the arguments."""
    if not positions or not any(id(leaf) in positions for leaf in pytree.tree_leaves(value)):
        return value

    def reference(leaf: Any) -> Any:
        return ArgumentObject(positions[id(leaf)]) if id(leaf) in positions else leaf

    return pytree.tree_map(reference, value)


def is_plain(value: Any) -> bool:
    """Whether a container holds only tensors, traced or not, and constants."""
    return all(isinstance(leaf, torch.Tensor) or is_constant(leaf) for leaf in pytree.tree_leaves(value))


def _refuse_kept(whole: Watched) -> None:
    for place, _, now in whole.changed():
        if not any(shows_traced(value) or numbers_of_data(value) for value in now):
            continue
        kind = type(whole.held).__name__
        raise UnsupportedProgram(
            f"`{place.path}` is a {kind}, and is given a tensor which the program computes, or a "
            "number that it reads off one",
            stage="capture",
            fix="keep these in a list, or return them",
        )


def _refuse_text(place: Source, value: Any) -> None:
    if any(map(is_text_of_traced, pytree.tree_leaves(value))):
        raise UnsupportedProgram(
            f"`{place.path}` is given a text of a tensor, which has no values while the program is captured",
            stage="capture",
            fix="keep the tensor, or the number (`loss.item()`), and make the text outside",
        )


def _refuse_deletion(place: Source, before: Any, value: Any) -> None:
    gone = [before] if value is ABSENT else []
    if place.is_whole_list and not is_plain(value):
        now = set(map(id, value))
        gone = [item for item in before if id(item) not in now]
    if any(isinstance(item, torch.Tensor) for item in gone):
        raise UnsupportedProgram(
            f"a tensor is taken out of `{place.path}`, which eager would not find at the next call",
            stage="capture",
            fix="let it be None instead, or do so outside of the compiled function",
        )


def _of_modules(modules: Mapping[str, nn.Module], ruled: Collection[nn.Module]) -> Iterator[_Place]:
    for path, module in modules.items():
        attributes = vars(module)
        kinds = ("_buffers", "_modules") if module in ruled else ("_parameters", "_buffers", "_modules")
        for held in (*map(attributes.__getitem__, (*kinds, *HOOKS)), attributes):
            yield (path, held, ()), held
        for name, value in attributes.items():
            if name not in OF_EVERY_MODULE and type(value) in (list, dict):
                yield (f"{path}.{name}" if path else name, module, (Attribute(name),)), value


def _containers(reached: Reached) -> Iterator[_Place]:
    for source, owner in reached.assignable.owners:
        if isinstance(vars(owner), dict):  # `list[int]` shows its class's, and takes no assignments
            yield (source.path, source.root, (*source.steps, *_ITS_ATTRIBUTES)), vars(owner)
    for source, container in reached.assignable.containers:
        yield (source.path, source.root, source.steps), container


def _variables(reached: Reached) -> Iterator[Watched]:
    watched = {id(held) for _, held in (*reached.assignable.containers, *reached.assignable.owners)}
    places = (source for source, _ in (*reached.tensors, *reached.constants))
    read = (source for source in places if source.steps and not isinstance(source.steps[-1], Applied))
    # The walk finds the attributes of an object one after the other: their owner is read once.
    for _, of_one in itertools.groupby(read, lambda source: (id(source.root), source.steps[:-1])):
        sources = list(of_one)
        # Attributes of tensors (which stand-ins replace in the trace) and of objects, and items of lists,
        # dictionaries and deques, are watched with their owner. Those of a tuple change with the tuple.
        owner = sources[0].owner().read_or(ABSENT)
        if not isinstance(owner, (torch.Tensor, tuple, deque)) and id(owner) not in watched:
            yield from map(_variable, sources)
    yield from map(_variable, reached.assignable.variables)
    yield from itertools.starmap(_class, reached.assignable.classes)


def changed_outside_of_modules(reached: Reached) -> Callable[[], bool]:
    """A function that returns whether closures, globals, objects or containers were changed since."""
    # Most tensors have no attributes; a deep model has thousands: 0.01 us each instead of 5, for each block.
    empty, contents = _contents(_containers(reached))
    filled, variables = [own(content.held) for content in empty], list(_variables(reached))
    return lambda: any(filled) or any(True for one in _watched(contents, variables) for _ in one.changed())


def _watched(contents: Iterable[_Content], variables: Iterable[Watched]) -> Iterator[Watched]:
    yield from (content.watched() for content in contents if content.has_changed())
    yield from variables


def _variable(source: Source) -> Watched:
    return Watched(source, None, source.read_or(ABSENT), functools.partial(source.read_or, ABSENT))


def _class(source: Source, cls: type, names: set[str]) -> Watched:
    read = functools.partial(_gained, cls, names)
    return Watched(source, cls, read(), read, lambda _, name: source.attribute(name))


def _gained(cls: type, names: set[str]) -> dict[str, Any]:
    """Those of the attributes `names` that a class has by now."""
    return {name: getattr(cls, name) for name in names.intersection(vars(cls))}


def _contents(places: Iterable[_Place]) -> tuple[list[_Content], list[_Content]]:
    """What containers hold: the empty ones, of which `len` is not the user's code, and the others."""
    empty, others = list[_Content](), list[_Content]()
    for place, container in places:
        held, now = shared(container), own(container)
        if type(now) in (list, dict, OrderedDict) and not now:
            empty.append(_Content(place, held, type(now)(), now))
        else:
            seen = _copied(now)
            others.append(_Content(place, held, with_shared(seen), seen))
    return empty, others


def _item(place: Source, cls: type[Any] | None, position: int, key: Any) -> Source:
    if isinstance(key, str):
        return place.item(key, f"{place.path}.{key}" if place.path else key, cls)
    return place.item_at(position, key, cls)


def _kept(container: _Container) -> _Container:
    """The items of a container for this thread; for dictionaries of a module's state, the shared ones."""
    return with_shared(_copied(own(container)))


def _copied(held: _Container) -> _Container:
    return held.copy() if type(held) is dict else kept_by(held)
