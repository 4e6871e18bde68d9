"""Index arithmetic: where an element lies in memory, as a function of a place in an iteration space.

An `Index` is a sum of atoms, each with a whole coefficient. Reshapes divide and take remainders, and
consumers multiply and add again; sums are kept in a form in which these cancel: `(i // 4) * 4 + i % 4` is
`i`. So views cost nothing, and a contiguous access is recognised as one.

Sizes and strides may differ from call to call (`aotdist.kernels.polynomial`): `(i // s0) * s0 + i % s0` is
`i` as well. Terms cancel only where that is proved for every call; others are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, TypeAlias

from aotdist.kernels.polynomial import (
    NotProved,
    Whole,
    at_most,
    common_divisor,
    divided,
    divides,
    floor,
    floor_bounds,
    hint_of,
    is_below,
)

Axis = Literal["p", "x", "r"]
"""Which side of an iteration space a variable runs over: results (`x`), or what is reduced to one (`r`).

Where results are also added up among themselves, they are cut in parts (`p`), one for each block.
"""


@dataclass(frozen=True, slots=True)
class Var:
    """A variable of the iteration space: `0 <= var < size`."""

    axis: Axis
    number: int
    size: Whole

    def __str__(self) -> str:
        return f"{self.axis}{self.number}"


@dataclass(frozen=True, slots=True)
class Quotient:
    """`of // by`, rounded down."""

    of: Index
    by: Whole

    def __str__(self) -> str:
        return f"({self.of} // {self.by})"


@dataclass(frozen=True, slots=True)
class Remainder:
    """`of % by`, never negative."""

    of: Index
    by: Whole

    def __str__(self) -> str:
        return f"({self.of} % {self.by})"


class Number(Protocol):
    """A whole number that a kernel computes: see `aotdist.kernels.ir.Expr`."""

    def indices(self) -> Iterator[Index]:
        """Where it is read from."""
        ...

    def substitute(self, places: Mapping[Var, Index]) -> Number:
        """The same with other indices in the place of variables."""
        ...


@dataclass(frozen=True, slots=True)
class Lookup:
    """A number that the kernel computes, to index with: `0 <= of < size`."""

    of: Number
    size: Whole

    def __str__(self) -> str:
        return f"[{self.of}]"


Atom: TypeAlias = Var | Quotient | Remainder | Lookup


@dataclass(frozen=True)
class Index:
    """`constant + sum(coefficient * atom)`. Make one with `number`, `variable` and arithmetic.

    Args:
        terms: atoms and their coefficients, which are not 0; each atom once, in the order of their text.
        constant: the rest.
    """

    terms: tuple[tuple[Atom, Whole], ...]
    constant: Whole

    def __str__(self) -> str:
        parts = [str(atom) if scale == 1 else f"{_factor(scale)}*{atom}" for atom, scale in self.terms]
        if self.constant != 0 or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)

    @cached_property
    def _hash(self) -> int:
        return hash((self.terms, self.constant))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def bounds(self) -> tuple[Whole, Whole]:
        """The least and the greatest value that it may take, or a little beyond.

        Raises:
            NotProved: it has a coefficient of either sign.
        """
        low = high = self.constant
        for atom, scale in self.terms:
            least, most = (end * scale for end in _bounds(atom))
            if not at_most(0, scale):
                if not at_most(scale, 0):
                    raise NotProved(f"the sign of {scale}")
                least, most = most, least
            low, high = low + least, high + most
        return low, high

    @property
    def is_natural(self) -> bool:
        """Whether it is never below 0, as far as can be proved."""
        try:
            return at_most(0, self.bounds[0])
        except NotProved:
            return False

    def __add__(self, other: Index | Whole) -> Index:
        if not isinstance(other, Index):
            return Index(self.terms, self.constant + other) if other != 0 else self
        if not other.terms:
            return self + other.constant
        scales = dict(self.terms)
        for atom, scale in other.terms:
            scales[atom] = scales.get(atom, 0) + scale
        return _joined(scales, self.constant + other.constant)

    def __sub__(self, other: Index | Whole) -> Index:
        return self + other * -1

    def __mul__(self, scale: Whole) -> Index:
        if scale == 1:
            return self
        if scale == 0:
            return number(0)
        return Index(tuple((atom, scale * own) for atom, own in self.terms), scale * self.constant)

    def __floordiv__(self, by: Whole) -> Index:
        outside, inside = self._split(by)
        return _divided(outside, by) + _quotient(inside, by)

    def __mod__(self, by: Whole) -> Index:
        _, inside = self._split(by)
        return _remainder(inside, by)

    def _split(self, by: Whole) -> tuple[Index, Index]:
        """A multiple of `by`, and the rest; the rest's constant is below `by` if both are known numbers."""
        whole = tuple(term for term in self.terms if divides(by, term[1]))
        rest = tuple(term for term in self.terms if not divides(by, term[1]))
        left = divided(self.constant, by)[1]
        return Index(whole, self.constant - left), Index(rest, left)

    def atoms(self) -> Iterator[Atom]:
        """Every atom in it, also inside of other atoms."""
        for atom, _ in self.terms:
            yield atom
            match atom:
                case Quotient(of) | Remainder(of):
                    yield from of.atoms()
                case Var() | Lookup():
                    pass

    def numbers(self) -> Iterator[Number]:
        """The numbers that must be computed to have it."""
        return (atom.of for atom in self.atoms() if isinstance(atom, Lookup))

    def variables(self) -> set[Var]:
        """The variables that it depends on, be it through a number that is computed."""
        own = {atom for atom in self.atoms() if isinstance(atom, Var)}
        return own.union(*(read.variables() for lookup in self.numbers() for read in lookup.indices()))

    def substitute(self, places: Mapping[Var, Index]) -> Index:
        """The same with other indices in the place of variables."""
        total = number(self.constant)
        for atom, scale in self.terms:
            total = total + _substituted(atom, places) * scale
        return total


def number(value: Whole) -> Index:
    """An index that is the same everywhere."""
    return Index((), value)


def variable(var: Var) -> Index:
    """A variable as an index; 0 for one that can take no other value."""
    return number(0) if var.size == 1 else Index(((var, 1),), 0)


def of_atom(atom: Atom) -> Index:
    """An atom as an index."""
    return Index(((atom, 1),), 0)


def num_places(indices: Iterable[Index]) -> Whole:
    """How many places of a space some indices distinguish."""
    variables = set[Var]().union(*(index.variables() for index in indices))
    return math.prod(var.size for var in variables)


def flat(indices: Sequence[Index], sizes: Sequence[Whole]) -> Index:
    """The place of an element among all those of a tensor, in row-major order."""
    return offset(indices, contiguous_strides(sizes))


def offset(indices: Sequence[Index], strides: Sequence[Whole]) -> Index:
    """Where an element lies, counted in elements from the first."""
    total = number(0)
    for index, stride in zip(indices, strides, strict=True):
        total = total + index * stride
    return total


def unflat(place: Index, sizes: Sequence[Whole]) -> tuple[Index, ...]:
    """The inverse of `flat`."""
    strides = contiguous_strides(sizes)
    return tuple(
        number(0) if size == 1 else (place // stride) % size
        for size, stride in zip(sizes, strides, strict=True)
    )


def contiguous_strides(sizes: Sequence[Whole]) -> tuple[Whole, ...]:
    """Strides of a tensor whose elements follow each other in row-major order."""
    strides: list[Whole] = []
    step: Whole = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def visits_each_once(indices: Sequence[Index], sizes: Sequence[Whole], space: Iterable[Var]) -> bool:
    """Whether a space visits every element of a tensor exactly once; False where that is not proved."""
    place, left = flat(indices, sizes), {var for var in space if var.size != 1}
    step: Whole = 1
    for atom, scale in sorted(place.terms, key=lambda term: hint_of(term[1])):
        if not isinstance(atom, Var) or scale != step or atom not in left:
            return False
        left.remove(atom)
        step *= atom.size
    return not left and place.constant == 0 and step == math.prod(sizes)


def _bounds(atom: Atom) -> tuple[Whole, Whole]:
    match atom:
        case Var(_, _, size) | Lookup(_, size):
            return 0, size - 1
        case Quotient(of, by):
            return floor_bounds(*of.bounds, by)
        case Remainder(of, by):
            low, high = of.bounds
            is_itself = at_most(0, low) and at_most(high, by - 1)
            return 0, high if is_itself else by - 1


def _substituted(atom: Atom, places: Mapping[Var, Index]) -> Index:
    match atom:
        case Var():
            return places[atom] if atom in places else of_atom(atom)
        case Quotient(of, by):
            return of.substitute(places) // by
        case Remainder(of, by):
            return of.substitute(places) % by
        case Lookup(of, size):
            return of_atom(Lookup(of.substitute(places), size))


def _joined(scales: dict[Atom, Whole], constant: Whole) -> Index:
    """The sum, with `q * (i // q)` and `i % q` of one index combined into `i`."""
    scales = {atom: scale for atom, scale in scales.items() if scale != 0}
    for atom, scale in scales.items():
        if not isinstance(atom, Remainder):
            continue
        quotient = (atom.of // atom.by) * (scale * atom.by)
        if quotient.terms and all(scales.get(part, 0) == own for part, own in quotient.terms):
            rest = {other: own for other, own in scales.items() if other is not atom}
            for part, _ in quotient.terms:
                del rest[part]
            return _joined(rest, constant - quotient.constant) + atom.of * scale
    return Index(tuple(sorted(scales.items(), key=lambda term: str(term[0]))), constant)


def _quotient(of: Index, by: Whole) -> Index:
    """`of // by` where no coefficient is a multiple of `by`."""
    same = floor(*of.bounds, by)
    if same is not None:
        return number(same)
    high_part, _, unit = _digits(of, by)
    if unit != 1:  # by is a multiple of unit, and the low part is below it: it never carries
        return _divided(high_part, unit) // divided(by, unit)[0]
    return _quotient_of_one(of, by)


def _quotient_of_one(of: Index, by: Whole) -> Index:
    if by == 1:
        return of
    match of.terms:
        case ((Remainder(inner, size), 1),) if of.constant == 0 and divides(by, size):
            return (inner // by) % divided(size, by)[0]
        case _:
            pass
    for atom, scale in of.terms:
        if isinstance(atom, Quotient) and scale == 1:  # (a + b // c) // d is (a * c + b) // (c * d)
            return ((of - of_atom(atom)) * atom.by + atom.of) // (atom.by * by)
    return of_atom(Quotient(of, by))


def _remainder(of: Index, by: Whole) -> Index:
    """`of % by` where no coefficient is a multiple of `by`."""
    same = floor(*of.bounds, by)
    if same is not None:
        return of - same * by
    high_part, low_part, unit = _digits(of, by)
    if unit != 1:
        return _divided(high_part, unit) % divided(by, unit)[0] * unit + low_part
    return _remainder_of_one(of, by)


def _remainder_of_one(of: Index, by: Whole) -> Index:
    if by == 1:
        return number(0)
    match of.terms:
        case ((Remainder(inner, size), 1),) if of.constant == 0 and divides(by, size):
            return inner % by
        case _:
            return of_atom(Remainder(of, by))


def _digits(of: Index, by: Whole) -> tuple[Index, Index, Whole]:
    """A multiple of a unit that divides `by`, and a remainder in `[0, unit)`.

    Of all such units the largest; 1 if there is none.
    """
    for unit in sorted({common_divisor(scale, by) for _, scale in of.terms}, key=hint_of, reverse=True):
        if unit == 1:
            continue
        left = divided(of.constant, unit)[1]
        rest = Index(tuple(term for term in of.terms if not divides(unit, term[1])), left)
        low, high = rest.bounds
        if at_most(0, low) and is_below(high, unit):
            whole = Index(tuple(term for term in of.terms if divides(unit, term[1])), of.constant - left)
            return whole, rest, unit
    return of, number(0), 1


def _divided(of: Index, unit: Whole) -> Index:
    """`of // unit` where all of it is a multiple."""
    terms = tuple((atom, divided(scale, unit)[0]) for atom, scale in of.terms)
    return Index(terms, divided(of.constant, unit)[0])


def _factor(scale: Whole) -> str:
    """A coefficient as text that something can be multiplied with."""
    return str(scale) if isinstance(scale, int) or len(scale.terms) == 1 else f"({scale})"
