"""Symbols for sizes of the inputs of a trace, and the guards and conditions that the trace found for them.

Each size that may differ has a symbol of its own; if a trace compares two, or one with a number, the outcome
is a guard. A size of 0 or 1 is never symbolic: broadcasting and emptiness depend on it. A stride that is no
product of the tensor's own sizes (`ids[:, :-1]` has the strides of `ids`) has a symbol as well, and so has
each number that a program reads and changes (`self.steps += 1`), which as a constant would fit one call only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from aotdist.capture.arguments import Numbers
from aotdist.capture.source import Source
from aotdist.program import PrimalIdx, Slot
from aotdist.sizes import STATIC, Measure, Sizes, is_symbolic
from aotdist.subclasses.protocol import Constant, Plain, Recipe, wrapper_rule
from aotdist.torch_seam.symbols import (
    SYMBOLIC,
    expression,
    guards_of,
    is_open,
    new_count,
    new_symbol,
    specialised_at,
    symbols_in,
)
from aotdist.torch_seam.tensors import marked_dims
from aotdist.trace.failures import unsupported

if TYPE_CHECKING:
    from aotdist.torch_seam.symbols import ShapeEnv

Dims = Mapping[int, AbstractSet[int]]
"""Which dimensions of a tensor may differ from call to call, by the identity of the tensor."""


@dataclass(frozen=True, slots=True)
class Count:
    """A number that the program reads at a place and changes.

    Args:
        symbol: stands for the number.
        name: of the symbol.
        place: where the number is.
        kind: `int` or `float`.
    """

    symbol: torch.SymInt | torch.SymFloat
    name: str
    place: Source
    kind: type

    @property
    def is_given(self) -> bool:
        """Whether it is one of the call's arguments."""
        return isinstance(self.place.root, Numbers)


class Symbols:
    """The symbols of one trace.

    Args:
        env: has the symbols, and the guards; None if there are to be none.
        dims: which dimensions of which tensors get a symbol.
    """

    def __init__(self, env: ShapeEnv | None, dims: Dims) -> None:
        self._env = env
        self._dims = dims
        self._symbols: list[tuple[torch.SymInt, str, Measure]] = []
        self._counts: list[Count] = []
        self._computed_with: set[str] = set()
        self._conditions: list[tuple[Measure, Any]] = []
        self._marked: list[tuple[str, Any]] = []

    @property
    def none_allowed(self) -> bool:
        """Whether every size is a number, whatever `dims` says."""
        return self._env is None

    def recipe(self, at: PrimalIdx, slot: Slot, example: torch.Tensor, recipe: Recipe) -> Recipe:
        """`recipe`, that of `example`, with symbols in it."""
        if self._env is not None and is_symbolic(recipe):
            self._note_symbols_of_fake(at, recipe)
            return recipe
        dims = self._dims.get(id(example), frozenset())
        if self._env is None or not dims or example.is_conj() or example.is_neg():
            return recipe
        found: dict[tuple[str, str, int, int], torch.SymInt] = {}

        def symbol_for(
            measure: Measure, number: int, dims: AbstractSet[int], apart: str
        ) -> int | torch.SymInt:
            if number < 2 or (measure.of == "size" and measure.dim not in dims):
                return number
            key = (apart, measure.of, measure.dim, number)
            if key not in found:
                found[key] = self._new(slot, measure, number)
                if measure.of == "size" and measure.dim in marked_dims(example):
                    self._marked.append((measure.spelled(slot.path), found[key]))
            return found[key]

        return self._sized(recipe, at, "", frozenset(dims), "", symbol_for)

    def _note_symbols_of_fake(self, at: PrimalIdx, recipe: Recipe) -> None:
        """Note the symbols of a user's fake tensor, each at the first size that is this symbol alone."""
        assert isinstance(recipe, Plain), "a program of fake tensors has plain ones"
        known = {name for _, name, _ in self._symbols}
        for of, dim, symbol in _numbers(recipe.size, recipe.stride):
            name = expression(symbol) if is_open(symbol) else ""
            if name and symbols_in(symbol) == [name] and name not in known:
                known.add(name)
                self._symbols.append((symbol, name, Measure(at, "", of, dim)))

    @contextmanager
    def counting(self, places: Iterable[Source]) -> Generator[None]:
        """Put symbols in the places of numbers; the numbers are put back when the context is left."""
        numbers = [(place, place.read()) for place in places]
        try:
            for place, number in numbers:
                assert self._env is not None
                symbol = new_count(self._env, number, place.path)
                self._counts.append(Count(symbol, expression(symbol), place, type(number)))
                place.write(symbol)
            yield
        finally:
            for place, number in numbers:
                place.write(number)

    def counts(self) -> tuple[Count, ...]:
        """The numbers that have symbols."""
        return tuple(self._counts)

    def _new(self, slot: Slot, measure: Measure, number: int) -> torch.SymInt:
        assert self._env is not None
        symbol = new_symbol(self._env, number, measure.spelled(slot.path))
        self._symbols.append((symbol, expression(symbol), measure))
        return symbol

    def __iter__(self) -> Iterator[torch.SymInt | torch.SymFloat]:
        """The symbols of sizes, and of the counts that the graph computes with."""
        yield from (symbol for symbol, _, _ in self._symbols)
        yield from (count.symbol for count in self._counts if count.name in self._computed_with)

    def floats(self) -> set[str]:
        """The names of floats that the program reads and changes."""
        return {count.name for count in self._counts if issubclass(count.kind, float)}

    def decides_by(self, names: AbstractSet[str]) -> bool:
        """Whether a guard has one of these symbols."""
        return any(not names.isdisjoint(re.findall(r"\w+", decided)) for decided in self.sizes().decided)

    def note(self, numbers: Iterable[torch.SymInt | torch.SymFloat]) -> None:
        """Note that the graph computes with these numbers."""
        self._computed_with.update(name for number in numbers for name in symbols_in(number))

    def _sized(
        self,
        recipe: Recipe,
        at: PrimalIdx,
        inner: str,
        dims: frozenset[int],
        apart: str,
        symbol_for: Callable[[Measure, int, AbstractSet[int], str], Any],
    ) -> Recipe:
        """The recipe with symbols, which only parts with one `apart` share for equal sizes."""
        if isinstance(recipe, Constant):
            return recipe

        def number_of(of: Literal["size", "stride"], dim: int, number: int) -> Any:
            return symbol_for(Measure(at, inner, of, dim), number, dims, apart)

        size = tuple(number_of("size", dim, n) for dim, n in enumerate(recipe.size))
        stride = recipe.stride
        if is_symbolic(size):  # else the strides are those of every call, as the sizes are
            stride = symbolic_strides(size, recipe.size, stride, lambda dim, n: number_of("stride", dim, n))
        for of, dim, number in _numbers(size, stride):
            if isinstance(number, SYMBOLIC):
                self._expect(Measure(at, inner, of, dim), number)
        sized = replace(recipe, size=torch.Size(size), stride=stride)
        if isinstance(sized, Plain):
            return sized
        rule, attributes = wrapper_rule(sized.cls), list[tuple[str, Recipe]]()
        for name, part in sized.attributes:
            path, inside = f"{inner}.{name}", rule.dims_inside(sized, name, dims)
            of_part = self._sized(part, at, path, inside, apart if rule.sized else path, symbol_for)
            attributes.append((name, of_part))
        return replace(sized, attributes=tuple(attributes))

    def _expect(self, measure: Measure, number: Any) -> None:
        if not any(measure == known for _, _, known in self._symbols):
            self._conditions.append((measure, number))

    def sizes(self) -> Sizes:
        """The symbols, and the conditions and guards that the trace, and later stages, found for them.

        Raises:
            UnsupportedProgram: a dimension that was marked as dynamic turned out to be a certain number.
        """
        if self._env is None or not (self._symbols or self._counts):
            return STATIC
        for place, symbol in self._marked:
            where = specialised_at(self._env, symbol)
            if where is not None:
                raise unsupported(
                    f"`{place}` was marked as dynamic, and the program only works for {expression(symbol)}",
                    "do not mark it, or write the program for any size",
                    where,
                )
        conditions = tuple((measure, expression(number)) for measure, number in self._conditions)
        symbols = tuple((name, measure) for _, name, measure in self._symbols)
        names = {*dict(symbols), *(count.name for count in self._counts)}
        return Sizes(symbols, conditions, *map(tuple, guards_of(self._env, names)))


def _numbers(
    size: Sequence[Any], stride: Sequence[Any]
) -> Iterator[tuple[Literal["size", "stride"], int, Any]]:
    """Sizes, then strides, each with what it is and its dimension."""
    for dim, number in enumerate(size):
        yield "size", dim, number
    for dim, number in enumerate(stride):
        yield "stride", dim, number


def symbolic_strides(
    size: Sequence[Any],
    numbers: Sequence[int],
    strides: Sequence[int],
    symbol_for: Callable[[int, int], int | torch.SymInt],
) -> tuple[int | torch.SymInt, ...]:
    """The strides of a tensor as products of its symbolic sizes, where they are such products.

    Args:
        size: with symbols.
        numbers: the sizes as they are.
        strides: the strides as they are.
        symbol_for: what a stride is that is no such product, from its dimension and the stride as it is.
    """
    made: dict[int, Any] = {0: 0, 1: 1}
    found: dict[int, Any] = {}
    for dim in sorted(range(len(strides)), key=lambda dim: (strides[dim], numbers[dim])):
        number = strides[dim]
        found[dim] = made[number] if number in made else symbol_for(dim, number)
        made.setdefault(number * numbers[dim], found[dim] * size[dim])
    return tuple(found[dim] for dim in range(len(strides)))
