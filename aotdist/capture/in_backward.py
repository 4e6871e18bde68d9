"""Python state that a backward changes: in hooks that count or keep gradients, autograd functions.

In the trace a backward runs on stand-ins, with the Python state that the forward left. Its changes (appended
items, incremented numbers, constants) are undone, and every backward repeats them. Tensors that it keeps are
results of its graph. A call that finds what the captured call found has the same changes in its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from aotdist.capture.assignments import Assignments, is_plain
from aotdist.capture.constants import is_leaf, is_same
from aotdist.capture.effects import (
    NOTHING,
    Assign,
    Delete,
    Effect,
    EffectLog,
    NumberOrigin,
    Print,
    TensorResult,
    Tree,
    any_of,
    has_symbols,
)
from aotdist.capture.leaked_tensors import is_traced
from aotdist.capture.prints import Prints
from aotdist.capture.source import ABSENT, Source, Spot
from aotdist.capture.watched import assign
from aotdist.errors import UnsupportedProgram
from aotdist.program import NodeOutIdx
from aotdist.sizes import NumberStep, numbers_of_data
from aotdist.subclasses.protocol import recipe_of
from aotdist.torch_seam.symbols import SYMBOLIC, depends_on_data, hint, new_count, number_kind, symbols_in
from aotdist.torch_seam.trees import pytree

if TYPE_CHECKING:
    from aotdist.capture.argument_mutation import MutatedArguments
    from aotdist.capture.captured import Environment
    from aotdist.torch_seam.symbols import ShapeEnv


OriginsOf: TypeAlias = Callable[[Mapping[str, Any]], Sequence[tuple[str, torch.Tensor | NumberStep]]]
"""For numbers that depend on data, by symbol, what they follow from: see `Recorder.sources_of_numbers`."""


class InBackward:
    """Watches the backwards of one trace.

    Args:
        environment: what the program reaches; None for backwards whose changes are known already.
    """

    def __init__(self, environment: Environment | None) -> None:
        self._environment = environment
        self._left: Sequence[tuple[Source, Any]] = ()
        self.watch_given: Callable[[], MutatedArguments] | None = None
        """Begins to watch the arguments of the trace."""
        self.watch_forward: Callable[[], Callable[[], bool]] | None = None
        """Begins to watch a part of the forward, for changes of Python state outside of modules."""
        self.num_effects: Callable[[], tuple[int, ...]] = tuple
        """How many checks of data, and prints, the forward has made so far."""
        self.counts: Sequence[Source] = ()
        """Places of numbers for which symbols stand."""
        self.symbols: dict[str, Source] = {}
        """Symbols for the numbers that a backward finds there, which may differ from those of the forward."""
        self.whole = NOTHING
        """The changes of the backward of all results."""
        self.of_some: dict[frozenset[NodeOutIdx], EffectLog] = {}
        """The changes of backwards of some results."""
        self.kept: tuple[torch.Tensor, ...] = ()
        """The tensors that the last backward keeps."""
        self.replaced: Sequence[tuple[Source, torch.Tensor]] = ()
        """The places in which it replaced a tensor, and the replaced tensors."""

    def forward_left(self, values: Sequence[tuple[Source, Any]]) -> None:
        """Note what the forward assigned, so that a backward finds it though it was undone."""
        self._left = [(place, value) for place, value in values if not place.is_of_argument]

    def running(
        self, choice: Collection[NodeOutIdx] | None, env: ShapeEnv | None, origins_of: OriginsOf
    ) -> AbstractContextManager[None]:
        """A context for a backward of some results, or of all; its changes are noted and undone.

        Args:
            choice: the results; None for all.
            env: where symbols are made.
            origins_of: returns the origins of numbers.

        Raises:
            UnsupportedProgram: it keeps tensors in places that calls cannot assign.
        """
        if self._environment is None:
            return self._repeating(choice or ())
        return self._watching(choice, env, origins_of)

    @contextmanager
    def _repeating(self, choice: Collection[NodeOutIdx]) -> Generator[None]:
        """A context for a backward after the trace: its changes are known, and are undone."""
        changes, prints = self.changes(choice), Prints(())
        with changes.undone():
            with prints.noting():
                yield
            self.kept = changes.tensors_left(prints.made)

    @contextmanager
    def _watching(
        self, choice: Collection[NodeOutIdx] | None, env: ShapeEnv | None, origins_of: OriginsOf
    ) -> Generator[None]:
        """A context for a backward in the trace: it finds what the forward left; its changes are noted."""
        assert self._environment is not None, "a trace has one"
        with ExitStack() as stack:
            stack.callback(assign([*self._left, *self._other_symbols(env)]))
            watched = self._environment.assignments()
            given = self.watch_given() if self.watch_given is not None else None
            prints = Prints(watched.existing)
            try:
                with prints.noting():
                    yield
                _refuse_given(given)
                _refuse_hidden(watched)
                found = list(watched.changed_data(tensors=True))
                values = [*(value for _, _, value in found), *(each.given.leaves for each in prints.made)]
                as_result, self.kept, numbers = _results(values, origins_of, self.symbols)
                changed = [(place, before, Tree.of(value).map(as_result)) for place, before, value in found]
                effects, expected = _effects(changed, self._environment)
                printed = [replace(each, given=each.given.map(as_result)) for each in prints.made]
                kept = tuple(map(recipe_of, self.kept))
                changes = EffectLog((*printed, *effects), expected, kept, numbers)
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
        self.watch_forward, self.num_effects = None, tuple
        self.kept = self.replaced = ()

    def beyond(self) -> InBackward:
        """The same for backwards of backwards, whose changes are undone and not repeated."""
        later = InBackward(None)
        changes = tuple(each for each in self.whole.effects if not isinstance(each, Print))
        later.whole = replace(self.whole, effects=changes, kept=())
        return later

    def counts_of_whole(self) -> list[Source]:
        """Places in which the backward leaves an integer, or a number that it reads off a tensor."""
        leaves = [(place, tree.leaves[0]) for place, tree in self.whole.assigned() if tree.spec.is_leaf()]
        found = [(place, leaf) for place, leaf in leaves if type(leaf) is int or depends_on_data(leaf)]
        kinds = ((place, number_kind(leaf)) for place, leaf in found)
        return [place for place, kind in kinds if kind and type(place.read_or(None)) is kind]

    def changes(self, arrived: Collection[NodeOutIdx]) -> EffectLog:
        """The changes of a backward from these results."""
        return self.of_some.get(frozenset(arrived), self.whole)


def _effects(
    changes: Iterable[tuple[Source, Any, Tree]], environment: Environment
) -> tuple[Sequence[Effect], tuple[tuple[Source, tuple[Any, ...]], ...]]:
    """The effects of a backward, except on arguments, and the values that it expects.

    A hook may depend on what it finds, so places that the program may read are expected to have the value
    that they had here. An item that is assigned a tensor or a number may have that of another backward.

    Args:
        changes: place, old value and new value.
        environment: tells what the program may read.
    """
    effects: list[Effect] = []
    expected: list[tuple[Source, tuple[Any, ...]]] = []
    seen: set[Spot] = set()
    for place, before, tree in changes:
        value = tree.value()
        if place.is_of_argument or place.spot() in seen or is_same(before, value):
            continue
        seen.add(place.spot())
        effects.append(Delete(place) if value is ABSENT else Assign(place, tree))
        known = (before,)
        if place.is_grown_list:
            held = place.whole().whole_list()
            place, known = held, (held.read()[: -len(value)],)
        elif not environment.is_attribute(place) and any(map(_is_computed, tree.leaves)):
            known = (before, value)
        if environment.may_read(place) and not has_symbols(known := any_of(known)):
            expected.append((place, known))
    return effects, tuple(expected)


def _is_computed(leaf: Any) -> bool:
    """Whether it stands for a tensor, or a number, that a backward computes."""
    return isinstance(leaf, TensorResult) or depends_on_data(leaf)


def _results(
    values: Sequence[Any], origins_of: OriginsOf, found: Mapping[str, Source]
) -> tuple[Callable[[Any], Any], tuple[torch.Tensor, ...], tuple[tuple[str, NumberOrigin], ...]]:
    """A function that replaces tensors by `TensorResult`s, what these stand for, and `EffectLog.numbers`.

    Args:
        values: the values that a backward assigns or prints.
        origins_of: returns the origins of numbers.
        found: symbols for numbers that the backward finds, with their places.
    """
    leaves = pytree.tree_leaves(values, is_leaf=is_leaf)
    kept = list({id(leaf): leaf for leaf in leaves if is_traced(leaf)}.values())
    positions = {id(tensor): position for position, tensor in enumerate(kept)}
    steps: dict[str, NumberOrigin] = dict(found)
    for name, step in origins_of(numbers_of_data(values)):
        steps[name] = step if isinstance(step, NumberStep) else len(kept)
        kept += [] if isinstance(step, NumberStep) else [step]

    def as_result(leaf: Any) -> Any:
        return TensorResult(positions[id(leaf)]) if id(leaf) in positions else leaf

    names = {name for leaf in leaves if isinstance(leaf, SYMBOLIC) for name in symbols_in(leaf)}
    return as_result, tuple(kept), _origins_behind(names, steps)


def _origins_behind(
    names: Iterable[str], steps: Mapping[str, NumberOrigin]
) -> tuple[tuple[str, NumberOrigin], ...]:
    """The origins of some symbols, in the order in which they are computed."""
    needed = set(names)
    for name, step in reversed(list(steps.items())):
        if name in needed and isinstance(step, NumberStep):
            needed.update(step.symbols)
    return tuple((name, step) for name, step in steps.items() if name in needed)


def _refuse_given(given: MutatedArguments | None) -> None:
    if given is None:
        return
    for path in given.changed():
        raise UnsupportedProgram(
            f"the backward (a hook, an autograd function) changes `{path}`, which the call is given",
            stage="joint",
            fix="let it change what the function closes over, or what hangs on a module of it",
        )


def _refuse_hidden(watched: Assignments) -> None:
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
