"""What the backward changes in Python: hooks that count or keep gradients, autograd functions, checkpoints.

At capture a backward runs on stand-ins, and finds in Python what the forward left there. What it changes is
undone, and the runtime repeats it at every backward: appended items, incremented numbers, constants. Tensors
that it keeps are results of its graph. An artifact is for calls that find what this one found, so what the
backward finds is known, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from aotdist.capture.constants import is_leaf, is_same
from aotdist.capture.hidden import is_traced
from aotdist.capture.prints import Printed, Prints
from aotdist.capture.reassign import Reassignments, assign, is_plain
from aotdist.capture.source import ABSENT, Source, Spot
from aotdist.errors import UnsupportedProgram
from aotdist.program import NodeOutIdx
from aotdist.sizes import Expression, NumberStep, evaluate, numbers_of_data
from aotdist.subclasses.protocol import Recipe, recipe_of
from aotdist.torch_seam.symbols import SYMBOLIC, expression, hint, new_count, symbols_in
from aotdist.torch_seam.trees import pytree

if TYPE_CHECKING:
    from aotdist.capture.capture import Environment
    from aotdist.capture.given import GivenContainers
    from aotdist.torch_seam.symbols import ShapeEnv


_KINDS: Mapping[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """Stands for one of the tensors that a backward computes and keeps, by position."""

    position: int


@dataclass(frozen=True, slots=True)
class AnyTensor:
    """Stands for a tensor that a backward finds somewhere."""

    def __repr__(self) -> str:
        return "a tensor"


Behind: TypeAlias = "int | Source | NumberStep"
"""What a number of a backward is read off, found in, or computed by."""


@dataclass(frozen=True, slots=True)
class KeptNumber:
    """Stands for a number that a backward reads off tensors that it keeps, or computes from such.

    Args:
        kind: its type.
        expression: its value, in terms of symbols.
        steps: the symbols that are the backward's own, in order: of each the position of the tensor that it
            is read off, the place where the backward finds it, or how Python computes it.
    """

    kind: type
    expression: Expression
    steps: tuple[tuple[str, Behind], ...]

    def value(self, kept: Sequence[torch.Tensor], symbols: Mapping[str, Any]) -> Any:
        """The number, given the tensors that are kept and the symbols of the forward."""
        symbols = dict(symbols)
        for name, step in self.steps:
            match step:
                case int():
                    symbols[name] = kept[step].item()
                case Source():
                    symbols[name] = step.read()
                case NumberStep():
                    symbols[name] = step.value(symbols)
        return evaluate(self.expression, symbols)


@dataclass(frozen=True, slots=True)
class AnyNumber:
    """Stands for a number of a type that a backward finds somewhere: the one that another left."""

    kind: type

    def __repr__(self) -> str:
        return f"a number ({self.kind.__name__})"


Told: TypeAlias = Callable[[Mapping[str, Any]], Sequence[tuple[str, torch.Tensor | NumberStep]]]
"""From numbers that depend on data, by symbol, to what they follow from: see `Recorder.told`."""


@dataclass(frozen=True, slots=True)
class BackwardChanges:
    """What one backward changes.

    Args:
        grown: lists, and what is appended.
        added: places of whole numbers, and what is added to them.
        assigned: places that are assigned constants, tensors, or containers of some, and these.
        expected: what some of these may hold when the backward begins.
        deleted: places that hold nothing afterwards.
        kept: recipes of the tensors among these values, for which `KeptTensor` stands.
        printed: what is printed, and the leaves of what each call of `print` is given.
    """

    grown: tuple[tuple[Source, tuple[Any, ...]], ...] = ()
    added: tuple[tuple[Source, int], ...] = ()
    assigned: tuple[tuple[Source, Any], ...] = ()
    expected: tuple[tuple[Source, tuple[Any, ...]], ...] = ()
    deleted: tuple[Source, ...] = ()
    kept: tuple[Recipe, ...] = ()
    printed: tuple[tuple[Printed, tuple[Any, ...]], ...] = ()

    @classmethod
    def of(
        cls,
        changes: Iterable[tuple[Source, Any, Any]],
        kept: Sequence[torch.Tensor],
        printed: Iterable[tuple[Printed, tuple[Any, ...]]],
        environment: Environment,
    ) -> BackwardChanges:
        """The changes of a backward; not those of arguments.

        What a hook does may depend on what it finds, so places that the program may read are expected to hold
        what they held here. An item that is given a tensor or a number of the backward's may hold another's.

        Args:
            changes: place, value before and value after.
            kept: the tensors among the values.
            printed: what is printed.
            environment: says what the program may read.
        """
        grown, added, assigned, expected, deleted = [], [], [], [], []
        seen: set[Spot] = set()
        for place, before, value in changes:
            if place.is_of_argument or place.spot() in seen or is_same(before, value):
                continue
            seen.add(place.spot())
            if place.is_grown_list:
                grown.append((place.whole(), tuple(value)))
                held = place.whole().whole_list()
                if environment.may_read(held):
                    expected.append((held, (held.read()[: -len(value)],)))
                continue
            if (step := _step(before, value)) is not None:
                added.append((place, step))
                continue
            if value is ABSENT:
                deleted.append(place)
            else:
                assigned.append((place, value))
            if environment.may_read(place):
                keeps = not environment.is_attribute(place) and _has(value, (KeptTensor, KeptNumber))
                expected.append((place, (before, value) if keeps else (before,)))
        return cls(
            grown=tuple(grown),
            added=tuple(added),
            assigned=tuple(assigned),
            expected=tuple((place, _marked(known)) for place, known in expected if not _has(known, SYMBOLIC)),
            deleted=tuple(deleted),
            kept=tuple(map(recipe_of, kept)),
            printed=tuple(printed),
        )

    def __bool__(self) -> bool:
        return bool(self.grown or self.added or self.assigned or self.deleted or self.printed)

    def counts(self) -> list[Source]:
        """Places where a whole number may have been added to, or that are given a number that is read."""
        counts = [(place, int) for place, value in self.assigned if type(value) is int]
        counts += [(place, value.kind) for place, value in self.assigned if isinstance(value, KeptNumber)]
        return [place for place, kind in counts if kind is not bool and type(place.read_or(None)) is kind]

    def has_symbols(self) -> bool:
        """Whether a symbol is assigned: the backward does more to a number than to add a constant."""
        return _has([value for _, value in (*self.assigned, *self.grown)], SYMBOLIC)

    def numbers(self) -> list[KeptNumber]:
        """The numbers that it keeps."""
        values = [value for _, value in (*self.assigned, *self.grown, *self.printed)]
        leaves = pytree.tree_leaves(values, is_leaf=is_leaf)
        return [leaf for leaf in leaves if isinstance(leaf, KeptNumber)]

    def changed(self) -> Iterator[Source]:
        """The places that are changed; a list that is appended to is one place."""
        yield from (place.whole_list() for place, _ in self.grown)
        yield from (place for place, _ in (*self.added, *self.assigned))
        yield from self.deleted

    def repeat(self, kept: Sequence[Any], symbols: Mapping[str, Any]) -> None:
        """Make the changes again, with these tensors in the place of those that were kept.

        Args:
            kept: the tensors.
            symbols: the symbols of the forward, with their values.

        Raises:
            UnsupportedProgram: the backward finds other numbers than its forward left.
        """
        for call, leaves in self.printed:
            call.repeat(pytree.tree_unflatten(_another(list(leaves), kept, symbols), call.spec))
        for place, known in self.expected:
            expect(place, known)
        grown, assigned = (  # before anything is written: a number may follow from what is found
            [(place, _another(value, kept, symbols)) for place, value in changes]
            for changes in (self.grown, self.assigned)
        )
        for place, items in grown:
            place.read().extend(items)
        for place, step in self.added:
            place.write(place.read() + step)
        for place, value in assigned:
            place.write(value)
        for place in self.deleted:
            forget(place)

    def tensors_left(self, printed: Iterable[tuple[Printed, Sequence[Any]]]) -> tuple[torch.Tensor, ...]:
        """The tensors that a backward which has just run keeps, read from the places that hold them.

        Args:
            printed: what it has printed.
        """
        if not self.kept:
            return ()
        if self.numbers():
            raise UnsupportedProgram(
                "the backward (a hook, an autograd function) keeps a number that it reads off a tensor, and "
                "runs otherwise than with the gradients that are assumed (`create_graph`, other classes)",
                stage="runtime",
                fix="keep the tensor (`.detach()`), and read it outside",
            )
        found = [*(place.read_or(None) for place, _ in self.assigned)]
        found += [tuple(place.read()[-len(items) :]) for place, items in self.grown]
        found += [tuple(leaves) for _, leaves in printed]
        known = [value for _, value in (*self.assigned, *self.grown, *self.printed)]
        leaves, marks = (pytree.tree_leaves(values, is_leaf=is_leaf) for values in (found, known))
        pairs = zip(marks, leaves, strict=True)
        kept = {mark.position: leaf for mark, leaf in pairs if isinstance(mark, KeptTensor)}
        return tuple(kept[position] for position in range(len(self.kept)))

    @contextmanager
    def undone(self) -> Generator[None]:
        """Undo, when the context is left, what was changed inside in these places."""
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
        self.watch_given: Callable[[], GivenContainers] | None = None
        """Watches what the trace was given, from now on."""
        self.counts: Sequence[Source] = ()
        """Places where symbols stand for numbers."""
        self.symbols: dict[str, Source] = {}
        """The symbols that a backward finds there, and where: it may find other numbers than are left."""
        self.whole = NOTHING
        """What the backward of all results changes."""
        self.of_some: dict[frozenset[NodeOutIdx], BackwardChanges] = {}
        """What backwards of some results change."""
        self.kept: tuple[torch.Tensor, ...] = ()
        """What the last backward keeps."""
        self.replaced: Sequence[tuple[Source, torch.Tensor]] = ()
        """The places in which it replaced a tensor, and these tensors."""

    def forward_left(self, values: Sequence[tuple[Source, Any]]) -> None:
        """Note what the forward assigned: a backward is to find it, though it is undone between the two."""
        self._left = [(place, value) for place, value in values if not place.is_of_argument]

    def running(
        self, choice: Collection[NodeOutIdx] | None, env: ShapeEnv | None, told: Told
    ) -> AbstractContextManager[None]:
        """A context for a backward of some results, or of all; what it changes is noted, and undone.

        Args:
            choice: the results; None for all.
            env: where symbols are made.
            told: says what numbers follow from.

        Raises:
            UnsupportedProgram: it keeps tensors where they cannot be put at every call.
        """
        if self._environment is None:
            return self._repeating(choice or ())
        return self._watching(choice, env, told)

    @contextmanager
    def _repeating(self, choice: Collection[NodeOutIdx]) -> Generator[None]:
        """The trace is over, or there is none: what a backward changes is known, and undone."""
        changes, prints = self.changes(choice), Prints(())
        with changes.undone():
            with prints.heard():
                yield
            self.kept = changes.tensors_left(prints.noted())

    @contextmanager
    def _watching(
        self, choice: Collection[NodeOutIdx] | None, env: ShapeEnv | None, told: Told
    ) -> Generator[None]:
        """A backward of the trace: it finds what the forward left; what it changes is noted, and undone."""
        assert self._environment is not None, "a trace has one"
        with ExitStack() as stack:
            stack.callback(assign([*self._left, *self._other_symbols(env)]))
            watched = self._environment.reassignments()
            given = self.watch_given() if self.watch_given is not None else None
            prints = Prints(watched.existing)
            try:
                with prints.heard():
                    yield
                _refuse_given(given)
                _refuse_hidden(watched)
                found = list(watched.changed_data(tensors=True))
                values = [*(value for _, _, value in found), *(leaves for _, leaves in prints.noted())]
                named, self.kept = _naming(values, told, self.symbols)
                changes = BackwardChanges.of(
                    ((place, before, named(value)) for place, before, value in found),
                    self.kept,
                    ((call, tuple(map(named, leaves))) for call, leaves in prints.noted()),
                    self._environment,
                )
                self.replaced = [
                    (place, before) for place, before, _ in found if isinstance(before, torch.Tensor)
                ]
                if choice is None:
                    self.whole = changes
                else:
                    self.of_some[frozenset(choice)] = changes
            finally:
                watched.roll_back()

    def _other_symbols(self, env: ShapeEnv | None) -> Generator[tuple[Source, Any]]:
        left = {place.spot(): value for place, value in self._left}
        for place in self.counts:
            value = left.get(place.spot(), place.read())
            if isinstance(value, SYMBOLIC) and not numbers_of_data(value) and env is not None:
                symbol = new_count(env, hint(value), f"{place.path} in the backward")
                self.symbols.update(dict.fromkeys(symbols_in(symbol), place))
                yield place, symbol

    def close(self) -> None:
        """Let go of what the trace reached."""
        self._environment, self.watch_given, self._left, self.counts = None, None, (), ()
        self.kept = self.replaced = ()

    def beyond(self) -> InBackward:
        """The same for backwards of backwards, whose changes are only undone."""
        later = InBackward(None)
        later.whole = replace(self.whole, kept=(), printed=())
        return later

    def changes(self, arrived: Collection[NodeOutIdx]) -> BackwardChanges:
        """What a backward from these results changes."""
        return self.of_some.get(frozenset(arrived), self.whole)


def expect(place: Source, known: Sequence[Any]) -> None:
    """Check that a place holds one of the values that a backward is compiled for.

    Raises:
        UnsupportedProgram: it does not.
    """
    found = _marked(place.read_or(ABSENT))
    if not any(_agree(found, value) for value in known):
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
    """What is added to a number, if that is certain: between plain numbers it may be a coincidence."""
    if not (isinstance(before, torch.SymInt) and isinstance(value, (int, torch.SymInt))):
        return None
    step = value - before
    return None if isinstance(value, bool) or symbols_in(step) else int(step)


def _another(value: Any, kept: Sequence[Any], symbols: Mapping[str, Any]) -> Any:
    """A copy of `value` with what was kept in the place of `KeptTensor`s and `KeptNumber`s."""

    def own(leaf: Any) -> Any:
        match leaf:
            case KeptTensor(position=position):
                return kept[position]
            case KeptNumber():
                return leaf.value(kept, symbols)
            case _:
                return leaf

    return pytree.tree_map(own, value, is_leaf=is_leaf)


def _naming(
    values: Sequence[Any], told: Told, found: Mapping[str, Source]
) -> tuple[Callable[[Any], Any], tuple[torch.Tensor, ...]]:
    """What puts `KeptTensor`s and `KeptNumber`s into values, and the tensors that they stand for.

    Args:
        values: what a backward changes.
        told: says what numbers follow from.
        found: symbols that the backward finds, and where.
    """
    leaves = pytree.tree_leaves(values, is_leaf=is_leaf)
    kept = list({id(leaf): leaf for leaf in leaves if is_traced(leaf)}.values())
    positions = {id(tensor): position for position, tensor in enumerate(kept)}
    steps: dict[str, Behind] = dict(found)
    for name, step in told(numbers_of_data(values)):
        steps[name] = step if isinstance(step, NumberStep) else len(kept)
        kept += [] if isinstance(step, NumberStep) else [step]

    def named(leaf: Any) -> Any:
        if id(leaf) in positions:
            return KeptTensor(positions[id(leaf)])
        if not isinstance(leaf, SYMBOLIC) or not numbers_of_data(leaf):
            return leaf
        own = _behind(symbols_in(leaf), steps)
        if not own:  # it is of the forward
            return leaf
        return KeptNumber(_KINDS[type(leaf)], expression(leaf), own)

    return lambda value: pytree.tree_map(named, value, is_leaf=is_leaf), tuple(kept)


def _behind(names: Iterable[str], steps: Mapping[str, Behind]) -> tuple[tuple[str, Behind], ...]:
    """Those of the steps that some numbers follow from, in order."""
    needed = set(names)
    for name, step in reversed(list(steps.items())):
        if name in needed and isinstance(step, NumberStep):
            needed.update(step.symbols)
    return tuple((name, step) for name, step in steps.items() if name in needed)


def _has(value: Any, kinds: type | tuple[type, ...]) -> bool:
    return any(isinstance(leaf, kinds) for leaf in pytree.tree_leaves(value, is_leaf=is_leaf))


def _marked(value: Any) -> Any:
    """`value` with `AnyTensor` in the place of tensors: they are not kept alive, and any others will do.

    So will other numbers than those that depend on data.
    """

    def marked(leaf: Any) -> Any:
        if isinstance(leaf, (torch.Tensor, KeptTensor)):
            return AnyTensor()
        return AnyNumber(leaf.kind) if isinstance(leaf, KeptNumber) else leaf

    return pytree.tree_map(marked, value, is_leaf=is_leaf)


def _agree(one: Any, other: Any) -> bool:
    """Whether a value that is found is one that is expected, or a container of such."""
    leaves, specs = zip(*(pytree.tree_flatten(value, is_leaf=is_leaf) for value in (one, other)), strict=True)
    return specs[0] == specs[1] and all(map(_is_same_leaf, *leaves))


def _is_same_leaf(one: Any, other: Any) -> bool:
    if isinstance(other, AnyNumber):
        return type(one) is other.kind
    return one == other if isinstance(one, AnyTensor) else is_same(one, other)


def _refuse_given(given: GivenContainers | None) -> None:
    if given is None:
        return
    for path in given.changed():
        raise UnsupportedProgram(
            f"the backward (a hook, an autograd function) changes `{path}`, which the call is given",
            stage="joint",
            fix="let it change what the function closes over, or what hangs on a module of it",
        )


def _refuse_hidden(watched: Reassignments) -> None:
    for path, value in watched.hidden():
        if is_plain(value):
            what = f"puts tensors that it computes in `{path}`, beside others that it finds there"
            fix = "append them to a list; or keep them in places of their own"
        else:
            what = f"keeps a tensor in an object that is no container: `{path}` is assigned it"
            fix = "keep the tensor itself, or a list, tuple or dictionary of tensors and constants"
        raise UnsupportedProgram(
            f"the backward (a hook, an autograd function) {what}", stage="joint", fix=fix
        )
