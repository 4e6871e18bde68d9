"""What the backward changes in Python: hooks that count or keep gradients, autograd functions, checkpoints.

A backward runs at capture, on stand-ins, where the forward has left everything. What it changes is undone,
and the runtime repeats it at every backward: items that are appended, numbers that are counted in, constants.
Tensors that it keeps are results of its graph.
An artifact is for calls that find what this one found, so that what the backward finds is known too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from aotdist.capture.constants import is_constant, is_leaf, is_same
from aotdist.capture.hidden import is_traced
from aotdist.capture.reassign import Reassignments, assign
from aotdist.capture.source import ABSENT, Source
from aotdist.errors import UnsupportedProgram
from aotdist.program import NodeOutIdx
from aotdist.subclasses.protocol import Recipe, recipe_of
from aotdist.torch_seam import SYMBOLIC, hint, new_count, pytree, symbols_in

if TYPE_CHECKING:
    from aotdist.capture.capture import Environment
    from aotdist.torch_seam import ShapeEnv


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """Stands for a tensor that a backward computes and keeps: the position among these."""

    position: int


@dataclass(frozen=True, slots=True)
class BackwardChanges:
    """What one backward changes.

    Args:
        grown: lists, and what is appended.
        added: places of whole numbers, and what is added to them.
        assigned: places that are assigned constants, tensors, or containers of some, and these.
        expected: what some of these may hold when the backward begins: what they are assigned may be made of
            that.
        deleted: places that hold nothing afterwards.
        kept: recipes of the tensors among these values, for which `KeptTensor` stands.
    """

    grown: tuple[tuple[Source, tuple[Any, ...]], ...] = ()
    added: tuple[tuple[Source, int], ...] = ()
    assigned: tuple[tuple[Source, Any], ...] = ()
    expected: tuple[tuple[Source, tuple[Any, ...]], ...] = ()
    deleted: tuple[Source, ...] = ()
    kept: tuple[Recipe, ...] = ()

    @classmethod
    def of(cls, changes: Iterable[tuple[Source, Any, Any]], kept: Sequence[torch.Tensor]) -> BackwardChanges:
        """Those of a backward, given place, value before and value after; of arguments, there are none."""
        grown, added, assigned, expected, deleted = [], [], [], [], []
        seen: set[tuple[int, Any]] = set()
        for place, before, value in changes:
            if place.is_of_argument or place.spot() in seen or is_same(before, value):
                continue
            seen.add(place.spot())
            if place.is_grown_list:
                grown.append((place.whole(), tuple(value)))
                continue
            if (step := _step(before, value)) is not None:
                added.append((place, step))
                continue
            if value is ABSENT:
                deleted.append(place)
            else:
                assigned.append((place, value))
            if before is ABSENT or is_constant(before):
                expected.append((place, (before,)))
        changed = map(tuple, (grown, added, assigned, expected, deleted))
        return cls(*changed, kept=tuple(map(recipe_of, kept)))

    def __bool__(self) -> bool:
        return bool(self.grown or self.added or self.assigned or self.deleted)

    def counts(self) -> list[Source]:
        """Places where a whole number may have been added to."""
        return [place for place, value in self.assigned if type(value) is type(place.read_or(None)) is int]

    def has_symbols(self) -> bool:
        """Whether a symbol is assigned: what the backward makes of a number is no sum with a constant."""
        leaves = pytree.tree_leaves([value for _, value in (*self.assigned, *self.grown)], is_leaf=is_leaf)
        return any(isinstance(leaf, SYMBOLIC) for leaf in leaves)

    def after(self, second: BackwardChanges) -> BackwardChanges:
        """These, given what the same backward changes when it runs once more: a flag that is up stays up."""
        logged, again = ([items for _, items in changes.grown] for changes in (self, second))
        kept = tuple((place, value) for place, value in self.assigned if _has_kept(value))
        if logged != again or second.added or second.assigned != kept or second.deleted:
            return self
        left = {place.spot(): value for place, value in self.assigned}
        expected = tuple((place, (*known, left.get(place.spot(), ABSENT))) for place, known in self.expected)
        return replace(self, expected=expected)

    def repeat(self, kept: Sequence[Any]) -> None:
        """Change the same again, with these tensors.

        Raises:
            UnsupportedProgram: the backward finds other numbers than its forward left.
        """
        for place, known in self.expected:
            expect(place, known)
        for place, items in self.grown:
            place.read().extend(_another(items, kept))
        for place, step in self.added:
            place.write(place.read() + step)
        for place, value in self.assigned:
            place.write(_another(value, kept))
        for place in self.deleted:
            forget(place)

    def found(self) -> tuple[torch.Tensor, ...]:
        """What a backward keeps that has just run, where it is."""
        if not self.kept:
            return ()
        found = [*(place.read_or(None) for place, _ in self.assigned)]
        found += [tuple(place.read()[-len(items) :]) for place, items in self.grown]
        known = [value for _, value in (*self.assigned, *self.grown)]
        leaves, marks = (pytree.tree_leaves(values, is_leaf=is_leaf) for values in (found, known))
        pairs = zip(marks, leaves, strict=True)
        kept = {mark.position: leaf for mark, leaf in pairs if isinstance(mark, KeptTensor)}
        return tuple(kept[position] for position in range(len(self.kept)))

    @contextmanager
    def undone(self) -> Generator[None]:
        """Put back what changes inside in these places."""
        lists = [(place.whole_list(), list(place.read())) for place, _ in self.grown]
        places = [*(place for place, _ in (*self.added, *self.assigned)), *self.deleted]
        undo = assign([*lists, *((place, place.read_or(ABSENT)) for place in places)])
        try:
            yield
        finally:
            undo()


NOTHING = BackwardChanges()


class InBackward:
    """Watches the backwards of one trace.

    Args:
        environment: what the program reaches; None if nothing is to be watched.
    """

    def __init__(self, environment: Environment | None) -> None:
        self._environment = environment
        self._left: Sequence[tuple[Source, Any]] = ()
        self.counts: Sequence[Source] = ()
        """Places where symbols stand for numbers."""
        self.symbols: set[str] = set()
        """The names of those that a backward finds there: other numbers, for all it knows, than are left."""
        self._found_by_second: Sequence[tuple[Source, Any]] | None = None
        self._second = NOTHING
        self.whole = NOTHING
        """What the backward of all results changes."""
        self.of_some: dict[frozenset[NodeOutIdx], BackwardChanges] = {}
        """What backwards of some results change."""
        self.kept: tuple[torch.Tensor, ...] = ()
        """What the last backward keeps."""
        self.replaced: Sequence[tuple[Source, torch.Tensor]] = ()
        """Tensors that it puts something else in the place of."""

    def forward_left(self, values: Sequence[tuple[Source, Any]]) -> None:
        """Note what the forward assigned, which a backward finds; outside, it is put back."""
        self._left = [(place, value) for place, value in values if not place.is_of_argument]

    @contextmanager
    def running(self, choice: Collection[NodeOutIdx] | None, env: ShapeEnv | None) -> Generator[None]:
        """Around a backward of some results, or of all; what it changes is noted, and undone.

        Args:
            choice: the results; None for all.
            env: where symbols are made.

        Raises:
            UnsupportedProgram: it keeps tensors where they cannot be put at every call.
        """
        if self._environment is None:  # the trace is over, or there is none
            changes = self.changes(choice or ())
            with changes.undone():
                yield
                self.kept = changes.found()
            return
        undo = assign([*self._left, *self._other_symbols(env), *(self._found_by_second or ())])
        try:
            watched = self._environment.reassignments()
            try:
                yield
                _refuse_hidden(watched)
                found, self.kept = _without_tensors(watched.changed_data(tensors=True))
                changes = BackwardChanges.of(found, self.kept)
                self.replaced = [
                    (place, before) for place, before, _ in found if isinstance(before, torch.Tensor)
                ]
            finally:
                watched.roll_back()
        finally:
            undo()
        if self._found_by_second is None:
            self._note(choice, changes)
        else:
            self._second = changes

    def _note(self, choice: Collection[NodeOutIdx] | None, changes: BackwardChanges) -> None:
        if choice is None:
            self.whole = changes
        else:
            self.of_some[frozenset(choice)] = changes

    def try_again(
        self,
        choice: Collection[NodeOutIdx] | None,
        kept: Sequence[torch.Tensor],
        computes_the_same: Callable[[], bool],
    ) -> None:
        """Find out what of its changes a backward may find, if it is the same one then.

        Args:
            choice: the results that it is of; None for all.
            kept: what it keeps.
            computes_the_same: runs it once more, where it has run before: is what it computes the same?
        """
        first = self.whole if choice is None else self.of_some[frozenset(choice)]
        if not first.expected:
            return
        left = [(place, _another(value, kept)) for place, value in first.assigned]
        self._found_by_second = [*left, *((place, ABSENT) for place in first.deleted)]
        try:
            if computes_the_same():
                self._note(choice, first.after(self._second))
        except Exception:  # the user's code expects to find something else: only that is known then
            return
        finally:
            self._found_by_second = None

    def _other_symbols(self, env: ShapeEnv | None) -> Generator[tuple[Source, Any]]:
        left = {place.spot(): value for place, value in self._left}
        for place in self.counts:
            value = left.get(place.spot(), place.read())
            if isinstance(value, torch.SymInt) and env is not None:
                symbol = new_count(env, hint(value), f"{place.path} in the backward")
                self.symbols.update(symbols_in(symbol))
                yield place, symbol

    def close(self) -> None:
        """Let go of what the trace reached."""
        self._environment, self._left, self.counts = None, (), ()
        self.kept = self.replaced = ()

    def beyond(self) -> InBackward:
        """For backwards of backwards: what they change is undone, and that is all."""
        later = InBackward(None)
        later.whole = replace(self.whole, kept=())
        return later

    def changes(self, arrived: Collection[NodeOutIdx]) -> BackwardChanges:
        """What a backward changes where these gradients have arrived."""
        return self.of_some.get(frozenset(arrived), self.whole)


def expect(place: Source, known: Sequence[Any]) -> None:
    """See that a place holds one of the values that a backward is known to find there.

    Raises:
        UnsupportedProgram: it does not.
    """
    found = place.read_or(ABSENT)
    if not any(_is_like(found, value) for value in known):
        said, left = ("nothing" if value is ABSENT else repr(value) for value in (found, known[0]))
        raise UnsupportedProgram(
            f"the backward changes `{place.path}`, and finds {said} in it where its forward left {left}",
            stage="runtime",
            fix="run the backward of a call before the next call, and once; or count in a buffer (a tensor)",
        )


def forget(place: Source) -> None:
    """Let a place hold nothing, if it holds anything."""
    if place.read_or(ABSENT) is not ABSENT:
        place.delete()


def _step(before: Any, value: Any) -> int | None:
    """What is added to a number, if that is known: of symbols, not of what may be a coincidence."""
    if not (isinstance(before, torch.SymInt) and isinstance(value, (int, torch.SymInt))):
        return None
    step = value - before
    return None if isinstance(value, bool) or symbols_in(step) else int(step)


def _another(value: Any, kept: Sequence[Any]) -> Any:
    """`value` with these tensors; another one, if it is a container."""
    leaves, spec = pytree.tree_flatten(value, is_leaf=is_leaf)
    leaves = [kept[leaf.position] if isinstance(leaf, KeptTensor) else leaf for leaf in leaves]
    return pytree.tree_unflatten(leaves, spec)


def _without_tensors(
    changes: Iterator[tuple[Source, Any, Any]],
) -> tuple[list[tuple[Source, Any, Any]], tuple[torch.Tensor, ...]]:
    """Changes with `KeptTensor` in the place of tensors, and these."""
    positions: dict[int, int] = {}
    kept: list[torch.Tensor] = []

    def named(leaf: Any) -> Any:
        if not is_traced(leaf):
            return leaf
        if id(leaf) not in positions:
            positions[id(leaf)] = len(kept)
            kept.append(leaf)
        return KeptTensor(positions[id(leaf)])

    found = [
        (place, before, pytree.tree_map(named, value, is_leaf=is_leaf)) for place, before, value in changes
    ]
    return found, tuple(kept)


def _has_kept(value: Any) -> bool:
    return any(isinstance(leaf, KeptTensor) for leaf in pytree.tree_leaves(value))


def _is_like(found: Any, known: Any) -> bool:
    """Whether it is the same; any tensors are, where some are kept."""
    if not _has_kept(known):
        return is_same(found, known)
    pairs, specs = zip(*map(pytree.tree_flatten, (found, known)), strict=True)
    return specs[0] == specs[1] and all(
        isinstance(one, torch.Tensor) if isinstance(other, KeptTensor) else is_same(one, other)
        for one, other in zip(*pairs, strict=True)
    )


def _refuse_hidden(watched: Reassignments) -> None:
    for path in watched.hidden():
        raise UnsupportedProgram(
            "the backward (a hook, an autograd function) keeps a tensor in an object that is no container: "
            f"`{path}` is assigned it",
            stage="joint",
            fix="keep the tensor itself, or a list, tuple or dictionary of tensors and constants",
        )
