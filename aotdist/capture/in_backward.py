"""What the backward changes in Python: hooks that count, autograd functions that keep a log, checkpoints.

A backward runs at capture, on stand-ins, where the forward has left everything. What it changes is undone,
and the runtime repeats it at every backward: items that are appended, numbers that are counted in, constants.
An artifact is for calls that find what this one found, so that what the backward finds is known too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from aotdist.capture.constants import is_constant, is_leaf, is_same
from aotdist.capture.reassign import Reassignments, assign
from aotdist.capture.source import ABSENT, Source
from aotdist.errors import UnsupportedProgram
from aotdist.program import NodeOutIdx
from aotdist.torch_seam import SYMBOLIC, hint, new_count, pytree, symbols_in

if TYPE_CHECKING:
    from aotdist.capture.capture import Environment
    from aotdist.torch_seam import ShapeEnv


@dataclass(frozen=True, slots=True)
class BackwardChanges:
    """What one backward changes.

    Args:
        grown: lists, and what is appended.
        added: places of whole numbers, and what is added to them.
        assigned: places that are assigned constants, or containers of some, and these.
        expected: what some of these may hold when the backward begins: what they are assigned may be made of
            that.
        deleted: places that hold nothing afterwards.
    """

    grown: tuple[tuple[Source, tuple[Any, ...]], ...] = ()
    added: tuple[tuple[Source, int], ...] = ()
    assigned: tuple[tuple[Source, Any], ...] = ()
    expected: tuple[tuple[Source, tuple[Any, ...]], ...] = ()
    deleted: tuple[Source, ...] = ()

    @classmethod
    def of(cls, changes: Iterator[tuple[Source, Any, Any]]) -> BackwardChanges:
        """Those of a backward, given place, value before and value after; of arguments, there are none."""
        grown, added, assigned, expected, deleted = [], [], [], [], []
        seen: set[tuple[int, Any]] = set()
        for place, before, value in changes:
            if place.is_of_argument or place.spot() in seen or is_same(before, value):
                continue
            seen.add(place.spot())
            if value is ABSENT:
                deleted.append(place)
            elif place.is_grown_list:
                grown.append((place.whole(), tuple(value)))
            elif (step := _step(before, value)) is not None:
                added.append((place, step))
            else:
                assigned.append((place, value))
                if before is ABSENT or is_constant(before):
                    expected.append((place, (before,)))
        return cls(*map(tuple, (grown, added, assigned, expected, deleted)))

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
        if logged != again or second.added or second.assigned or second.deleted:
            return self
        left = {place.spot(): value for place, value in self.assigned}
        expected = tuple((place, (*known, left[place.spot()])) for place, known in self.expected)
        return replace(self, expected=expected)

    def repeat(self) -> None:
        """Change the same again.

        Raises:
            UnsupportedProgram: the backward finds other numbers than its forward left.
        """
        for place, known in self.expected:
            expect(place, known)
        for place, items in self.grown:
            place.read().extend(items)
        for place, step in self.added:
            place.write(place.read() + step)
        for place, value in self.assigned:
            place.write(_another(value))
        for place in self.deleted:
            place.delete()

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
        self._is_second, self._second = False, NOTHING
        self.whole = NOTHING
        """What the backward of all results changes."""
        self.of_some: dict[frozenset[NodeOutIdx], BackwardChanges] = {}
        """What backwards of some results change, where any changes anything."""

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
            UnsupportedProgram: it keeps tensors.
        """
        if self._environment is None:  # the trace is over, or there is none
            with self.changes(choice or ()).undone():
                yield
            return
        more = self.whole.assigned if self._is_second else ()
        undo = assign([*self._left, *self._other_symbols(env), *more])
        try:
            watched = self._environment.reassignments()
            try:
                yield
                _refuse_kept(watched)
                changes = BackwardChanges.of(watched.changed_data())
            finally:
                watched.roll_back()
        finally:
            undo()
        if self._is_second:
            self._second = changes
        elif choice is None:
            self.whole = changes
        else:
            self.of_some[frozenset(choice)] = changes

    def try_again(self, computes_the_same: Callable[[], bool]) -> None:
        """Find out what of its changes a backward may find, if it is the same one then.

        Args:
            computes_the_same: runs the backward once more, where it has run before: is what it computes the
                same?
        """
        self._is_second = bool(self.whole.expected)
        try:
            if self._is_second and computes_the_same():
                self.whole = self.whole.after(self._second)
        finally:
            self._is_second = False

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

    def changes(self, arrived: Collection[NodeOutIdx]) -> BackwardChanges:
        """What a backward changes where these gradients have arrived."""
        return self.of_some.get(frozenset(arrived), self.whole)


def expect(place: Source, known: Sequence[Any]) -> None:
    """See that a place holds one of the values that a backward is known to find there.

    Raises:
        UnsupportedProgram: it does not.
    """
    found = place.read_or(ABSENT)
    if not any(is_same(found, value) for value in known):
        said, left = ("nothing" if value is ABSENT else repr(value) for value in (found, known[0]))
        raise UnsupportedProgram(
            f"the backward changes `{place.path}`, and finds {said} in it where its forward left {left}",
            stage="runtime",
            fix="run the backward of a call before the next call, and once; or count in a buffer (a tensor)",
        )


def _step(before: Any, value: Any) -> int | None:
    """What is added to a number, if that is known: of symbols, not of what may be a coincidence."""
    if not (isinstance(before, torch.SymInt) and isinstance(value, (int, torch.SymInt))):
        return None
    step = value - before
    return None if isinstance(value, bool) or symbols_in(step) else int(step)


def _another(value: Any) -> Any:
    """`value`; another one, if it is a container."""
    leaves, spec = pytree.tree_flatten(value, is_leaf=is_leaf)
    return pytree.tree_unflatten(leaves, spec)


def _refuse_kept(watched: Reassignments) -> None:
    for path in watched.kept():
        raise UnsupportedProgram(
            f"the backward (a hook, an autograd function) keeps a tensor that it computes: `{path}` is "
            "assigned it",
            stage="joint",
            fix="keep it outside of the compiled function: let a hook of a result, or of an argument, do so, "
            "or return the tensor and use `retain_grad()`",
        )
