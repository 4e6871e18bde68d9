"""The log of what a program, or its backward, does in Python: assignments, deletions, prints, checks of data.

These effects are undone after the trace. Every call replays them when it has run, and every backward when its
gradients are computed. A `TensorResult` in them stands for a computed tensor, a symbol for a number that
differs from call to call.
"""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from aotdist.capture.constants import is_leaf, is_same
from aotdist.capture.source import ABSENT, Source
from aotdist.capture.watched import assign
from aotdist.errors import UnsupportedProgram
from aotdist.sizes import NumberStep, concrete
from aotdist.subclasses.protocol import Recipe, is_real, is_wrapper
from aotdist.torch_seam.checks import raise_check
from aotdist.torch_seam.modes import under_transform
from aotdist.torch_seam.symbols import SYMBOLIC, depends_on_data, number_kind
from aotdist.torch_seam.trees import pytree


@dataclass(frozen=True, slots=True)
class TensorResult:
    """Stands for a computed tensor, by position: an output of the program, or one that a backward keeps."""

    position: int


NumberOrigin: TypeAlias = "int | Source | NumberStep"
"""Where a number of a backward is from: a kept tensor (by position), a place, or a step of Python."""


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Stands for any tensor, or any number of a type, that another backward has assigned."""

    kind: type

    def __repr__(self) -> str:
        return "a tensor" if self.kind is torch.Tensor else f"a number ({self.kind.__name__})"


@dataclass(frozen=True, slots=True)
class Tree:
    """A value as a pytree: its structure, and its leaves, which are constants and results."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, value: Any) -> Tree:
        """`value`, flattened."""
        leaves, spec = pytree.tree_flatten(value, is_leaf=is_leaf)
        return cls(spec, tuple(leaves))

    def map(self, function: Callable[[Any], Any]) -> Tree:
        """The same structure of other leaves."""
        return Tree(self.spec, tuple(map(function, self.leaves)))

    def value(self) -> Any:
        """The value, with new containers."""
        return pytree.tree_unflatten(list(self.leaves), self.spec)

    def has(self, *kinds: type) -> bool:
        """Whether there is a leaf of one of these kinds."""
        return any(isinstance(leaf, kinds) for leaf in self.leaves)


@dataclass(frozen=True, slots=True)
class Assign:
    """A place is assigned a value; items appended to a list have a place, too (`Source.items_from`)."""

    place: Source
    value: Tree


@dataclass(frozen=True, slots=True)
class Delete:
    """What is at a place is deleted."""

    place: Source


@dataclass(frozen=True, slots=True)
class Print:
    """One call of `print`, or a message to a logger.

    Args:
        file: where `print` writes; None for `sys.stdout`.
        given: the arguments of `print`, positional ones and others; or message, its arguments, and `extra`.
        logger: logger, level, file, line and function of the user's call; None for `print`.
    """

    file: Any
    given: Tree
    logger: tuple[logging.Logger, int, str, int, str] | None = None

    def make(self, given: Any) -> None:
        """Print, or log, with these arguments; `print` is looked up now."""
        if self.logger is None:
            args, kwargs = given
            print(*args, **kwargs, file=self.file)
            return
        logger, level, file, line, function = self.logger
        if logger.isEnabledFor(level):
            message, args, extra = given
            record = logger.makeRecord(logger.name, level, file, line, message, args, None, function, extra)
            logger.handle(record)


@dataclass(frozen=True, slots=True)
class Check:
    """An error to raise, once the program has run, if a computed boolean is false.

    `torch._check_tensor_all` makes such checks, and so does the validation of parameters and values in
    `torch.distributions`. The program's writes are done by then; eager raises at the check.

    Args:
        error: the name of the exception, a built-in one.
        message: its text; None for PyTorch's.
        holds: the boolean.
    """

    error: str
    message: str | None
    holds: Tree


def require(holds: torch.Tensor, check: Check) -> None:
    """Raise the error of a check unless it holds."""
    if not holds.item():
        raise_check(getattr(builtins, check.error), check.message)


class Checks:
    """The checks that a program makes, in order.

    Attributes:
        made: the checks.
    """

    def __init__(self) -> None:
        self.made: list[Check] = []
        self._has_returned = False

    def note(
        self, error: type[Exception], condition: torch.Tensor, message: Callable[[], object] | None
    ) -> bool:
        """Note a check; False if it cannot be made after the program has run."""
        is_built_in = getattr(builtins, error.__name__, None) is error
        if not is_built_in or under_transform() or is_wrapper(condition) or is_real(condition):
            return False
        name, text = error.__name__, None if message is None else str(message())
        if self._has_returned:  # a checkpoint that recomputes repeats checks of the forward
            return any((check.error, check.message) == (name, text) for check in self.made)
        self.made.append(Check(name, text, Tree.of(condition.detach().all())))
        return True

    def close(self) -> None:
        """Note that the program has returned."""
        self._has_returned = True


Effect: TypeAlias = Assign | Delete | Print | Check


@dataclass(frozen=True, slots=True)
class EffectLog:
    """Effects in order.

    Args:
        effects: the effects.
        expected: for some places, the values that they may have when the effects are replayed.
        kept: recipes of the tensors of a backward for which `TensorResult`s stand.
        numbers: symbols of numbers that a backward finds in places (counters), reads off these tensors, or
            computes from such numbers, in the order in which they are computed, with their origins.
    """

    effects: tuple[Effect, ...] = ()
    expected: tuple[tuple[Source, tuple[Any, ...]], ...] = ()
    kept: tuple[Recipe, ...] = ()
    numbers: tuple[tuple[str, NumberOrigin], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.effects)

    def assigned(self) -> list[tuple[Source, Tree]]:
        """Places that are assigned, or lists that are appended to, each with the value."""
        return [(each.place, each.value) for each in self.effects if isinstance(each, Assign)]

    def deleted(self) -> list[Source]:
        """The places whose values are deleted."""
        return [each.place for each in self.effects if isinstance(each, Delete)]

    def prints(self) -> list[Print]:
        """The prints."""
        return [each for each in self.effects if isinstance(each, Print)]

    def checks(self) -> list[Check]:
        """The checks of data."""
        return [each for each in self.effects if isinstance(each, Check)]

    def places(self) -> list[Source]:
        """All places that are changed; a list that is appended to is one place."""
        places = [each.place for each in self.effects if isinstance(each, (Assign, Delete))]
        return [place.whole().whole_list() if place.is_grown_list else place for place in places]

    def leaves(self) -> list[Any]:
        """The leaves of all values that are assigned, then of all that is printed."""
        trees = [*(value for _, value in self.assigned()), *(each.given for each in self.prints())]
        return [leaf for tree in trees for leaf in tree.leaves]

    def replay(self, results: Sequence[Any], symbols: Mapping[str, Any]) -> None:
        """Repeat the effects.

        Args:
            results: the tensors for which `TensorResult`s stand.
            symbols: the symbols of the forward, with their values.

        Raises:
            UnsupportedProgram: a place has another value than is expected.
        """
        symbols = self._with_own_numbers(results, symbols)

        def own(tree: Tree) -> Any:
            return tree.map(lambda leaf: _result(leaf, results, symbols)).value()

        for each in self.prints():
            each.make(own(each.given))
        for place, known in self.expected:
            expect(place, known)
        # Before anything is written: a number may be computed from the old value of a place.
        values = iter([own(tree) for _, tree in self.assigned()])
        for each in self.effects:
            match each:
                case Assign(place) if place.is_grown_list:
                    place.whole().read().extend(next(values))
                case Assign(place):
                    place.write(next(values))
                case Delete(place):
                    place.write(ABSENT)
                case Print() | Check():
                    pass

    def _with_own_numbers(self, results: Sequence[Any], symbols: Mapping[str, Any]) -> Mapping[str, Any]:
        """The symbols of the forward, and those of the numbers of the backward, with their values."""
        found = dict(symbols)
        for name, origin in self.numbers:
            match origin:
                case int():
                    found[name] = results[origin].item()
                case Source():
                    found[name] = origin.read()
                case NumberStep():
                    found[name] = origin.value(found)
        return found

    @contextmanager
    def undone(self) -> Generator[None]:
        """A context in which the effects may happen; their places are restored afterwards."""
        places = [(place, place.read_or(ABSENT)) for place in self.places()]
        undo = assign([(place, list(held) if place.is_whole_list else held) for place, held in places])
        try:
            yield
        finally:
            undo()

    def tensors_left(self, printed: Iterable[Print]) -> tuple[torch.Tensor, ...]:
        """The tensors that a backward has just assigned, read from their places.

        Args:
            printed: what it has printed.
        """
        if not self.kept:
            return ()
        if any(isinstance(origin, int) for _, origin in self.numbers):
            raise UnsupportedProgram(
                "the backward (a hook, an autograd function) keeps a number that it reads off a tensor, and "
                "runs otherwise than with the gradients that are assumed (`create_graph`, other classes)",
                stage="runtime",
                fix="keep the tensor (`.detach()`), and read it outside",
            )
        found = [_left(place, tree) for place, tree in self.assigned()]
        leaves = [leaf for tree in (*found, *(each.given for each in printed)) for leaf in tree.leaves]
        pairs = zip(self.leaves(), leaves, strict=True)
        kept = {mark.position: leaf for mark, leaf in pairs if isinstance(mark, TensorResult)}
        return tuple(kept[position] for position in range(len(self.kept)))


NOTHING = EffectLog()


def _left(place: Source, value: Tree) -> Tree:
    """The value at a place that was assigned, or the items that were appended to a list."""
    if place.is_grown_list:
        return Tree.of(place.whole().read()[-len(value.value()) :])
    return Tree.of(place.read_or(None))


def _result(leaf: Any, results: Sequence[Any], symbols: Mapping[str, Any]) -> Any:
    return results[leaf.position] if isinstance(leaf, TensorResult) else concrete(leaf, symbols)


def expect(place: Source, known: Sequence[Any]) -> None:
    """Check that a place has one of the values that a backward is compiled for.

    Raises:
        UnsupportedProgram: it has another value.
    """
    found = any_of(place.read_or(ABSENT))
    if not any(_agree(found, value) for value in known):
        now, left = ("nothing" if value is ABSENT else repr(value) for value in (found, known[0]))
        raise UnsupportedProgram(
            f"the backward changes `{place.path}`, and finds {now} in it where its forward left {left}",
            stage="runtime",
            fix="run the backward of a call before the next call, and once; or count in a buffer (a tensor)",
        )


def any_of(value: Any) -> Any:
    """`value` with an `AnyOf` in the place of each tensor, and each number that depends on data.

    Others of their kind are as good, and these are not kept alive.
    """

    def marked(leaf: Any) -> Any:
        if isinstance(leaf, (torch.Tensor, TensorResult)):
            return AnyOf(torch.Tensor)
        return AnyOf(number_kind(leaf) or bool) if depends_on_data(leaf) else leaf

    return Tree.of(value).map(marked).value()


def has_symbols(value: Any) -> bool:
    """Whether there are symbolic numbers in a value."""
    return Tree.of(value).has(*SYMBOLIC)


def _agree(found: Any, known: Any) -> bool:
    """Whether a value matches an expected one, which may contain `AnyOf`."""
    one, other = Tree.of(found), Tree.of(known)
    return one.spec == other.spec and all(map(_is_same_leaf, one.leaves, other.leaves))


def _is_same_leaf(found: Any, known: Any) -> bool:
    if isinstance(known, AnyOf):
        return found == known if isinstance(found, AnyOf) else type(found) is known.kind
    return is_same(found, known)
