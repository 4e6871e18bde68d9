"""Symbolic whole numbers: sums of products of symbols.

Sizes and strides of a graph with symbolic sizes are such numbers, and index arithmetic uses them like known
ones. Statements about them hold in every call, and are made only where they are proved: two are equal if they
are the same sum, and one is at most another if the difference, written in each symbol's excess over its least
value, has no negative coefficient. There is no `<`, which would need an answer in every case. Decisions that
are right either way use the numbers of the traced call (`hint_of`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import TypeAlias

from aotdist.sizes import evaluate


class NotProved(Exception):
    """A fact about symbolic sizes that emission needs could not be proved."""


@dataclass(frozen=True, slots=True, order=True)
class Symbol:
    """A number of which only a lower bound is known.

    Args:
        name: Python source: a symbol of the trace (`s0`), or an expression of such that is no polynomial.
        of: the symbols of the trace in it.
        least: its lower bound; None if there is none.
        hint: its value in the traced call.
    """

    name: str
    of: frozenset[str] = field(compare=False)
    least: int | None = field(compare=False)
    hint: int = field(compare=False)


Values: TypeAlias = Mapping[str, int]
"""The symbols of the trace in one call, by name."""

Product: TypeAlias = tuple[Symbol, ...]
"""Symbols in order, each repeated by its power; no symbols for 1."""


@dataclass(frozen=True)
class Polynomial:
    """A sum of products of symbols with coefficients. Make one with `symbol` and arithmetic.

    Args:
        terms: products and their coefficients, which are not 0; each product once, in order.
    """

    terms: tuple[tuple[Product, int], ...]

    def __str__(self) -> str:
        """Python source."""
        terms = sorted(self.terms, key=_order, reverse=True)
        text = " + ".join(_spelled(product, scale) for product, scale in terms)
        return text.replace("+ -", "- ")

    @cached_property
    def _hash(self) -> int:
        return hash(self.terms)

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: Whole) -> Whole:
        if isinstance(other, int) and other == 0:
            return self
        total = dict(self.terms)
        for product, scale in _terms(other):
            total[product] = total.get(product, 0) + scale
        return _whole(total)

    def __radd__(self, other: int) -> Whole:
        return self + other

    def __sub__(self, other: Whole) -> Whole:
        return self + other * -1

    def __rsub__(self, other: int) -> Whole:
        return self * -1 + other

    def __mul__(self, other: Whole) -> Whole:
        if isinstance(other, int):
            scaled = tuple((product, scale * other) for product, scale in self.terms)
            return Polynomial(scaled) if other else 0
        total: dict[Product, int] = {}
        for product, scale in self.terms:
            for more, times in _terms(other):
                both = tuple(sorted((*product, *more)))
                total[both] = total.get(both, 0) + scale * times
        return _whole(total)

    def __rmul__(self, other: int) -> Whole:
        return self * other

    @property
    def names(self) -> frozenset[str]:
        """The symbols of the trace that stand in it."""
        return frozenset(name for product, _ in self.terms for factor in product for name in factor.of)

    @cached_property
    def is_natural(self) -> bool:
        """Whether it is never below 0, as far as can be proved."""
        total: Whole = 0
        for product, scale in self.terms:
            part: Whole = scale
            for factor in product:
                if factor.least is None:
                    return False
                part = (Polynomial((((factor,), 1),)) + factor.least) * part
            total = total + part
        return all(scale >= 0 for _, scale in _terms(total))

    def at(self, values: Values) -> int:
        """The number in a call."""
        return sum(
            scale * math.prod(evaluate(factor.name, values) for factor in product)
            for product, scale in self.terms
        )


Whole: TypeAlias = int | Polynomial
"""A whole number, known or not."""


def symbol(name: str, of: Iterable[str] = (), *, least: int | None, hint: int) -> Polynomial:
    """A symbol as a polynomial; `of` are the symbols of the trace in it, by default itself."""
    return Polynomial((((Symbol(name, frozenset(of) or frozenset({name}), least, hint),), 1),))


def names_in(numbers: Iterable[Whole]) -> frozenset[str]:
    """The symbols of the trace that stand in some numbers."""
    return frozenset[str]().union(*(number.names for number in numbers if isinstance(number, Polynomial)))


def number_at(number: Whole, values: Values | None) -> int:
    """The value of a number in a call, see `Polynomial.at`; without values, in the traced call."""
    if isinstance(number, int):
        return number
    return hint_of(number) if values is None else number.at(values)


def hint_of(number: Whole) -> int:
    """A number in the call that is traced."""
    if isinstance(number, int):
        return number
    return sum(scale * math.prod(factor.hint for factor in product) for product, scale in number.terms)


def at_most(one: Whole, other: Whole) -> bool:
    """Whether one number is no greater than another, in every call; False where that cannot be proved."""
    more = other - one
    return more >= 0 if isinstance(more, int) else more.is_natural


def is_below(one: Whole, other: Whole) -> bool:
    """Whether one number is less than another, in every call; False where that cannot be proved."""
    return at_most(one + 1, other)


def divides(by: Whole, number: Whole) -> bool:
    """Whether one number is a multiple of another, in every call; False where that cannot be proved."""
    if isinstance(number, int) and isinstance(by, int):
        return number % by == 0
    return divided(number, by)[1] == 0


def divided(number: Whole, by: Whole) -> tuple[Whole, Whole]:
    """A quotient and a remainder: `quotient * by + remainder` is `number`.

    Of known numbers it is the quotient that `//` gives; of others the remainder may be anything.
    """
    if isinstance(number, int) and isinstance(by, int):
        return divmod(number, by)
    leading, left = max(_terms(by), key=_order), number
    quotient: Whole = 0
    rest: Whole = 0
    while left != 0:
        term = max(_terms(left), key=_order)
        factor = _divided_term(term, leading)
        if factor == 0:
            own = _whole(dict([term]))
            rest, left = rest + own, left - own
        else:
            quotient, left = quotient + factor, left - factor * by
    return quotient, rest


def _divided_term(term: tuple[Product, int], by: tuple[Product, int]) -> Whole:
    """How often one term is in another; 0 if it is not."""
    (product, scale), (divisor, times) = term, by
    factors = list(product)
    for factor in divisor:
        if factor not in factors:
            return 0
        factors.remove(factor)
    return _whole({tuple(factors): scale // times}) if not factors or scale % times == 0 else 0


def common_divisor(one: Whole, other: Whole) -> Whole:
    """A number that divides two others; of known ones the greatest."""
    if isinstance(one, int) and isinstance(other, int):
        return math.gcd(one, other)
    for whole, part in ((one, other), (other, one)):
        if part != 0 and divides(part, whole):
            return part
    terms = [*_terms(one), *_terms(other)]
    shared = reduce(lambda left, more: left & more, (Counter(product) for product, _ in terms))
    return _whole({tuple(sorted(shared.elements())): math.gcd(*(scale for _, scale in terms))})


def floor(low: Whole, high: Whole, by: Whole) -> Whole | None:
    """`number // by`, rounded down, if it is the same for all numbers from `low` to `high`; else None."""
    if isinstance(low, int) and isinstance(high, int) and isinstance(by, int):
        return low // by if low // by == high // by else None
    quotient, _ = divided(low, by)
    for found in (quotient, quotient - 1):
        if at_most(found * by, low) and is_below(high, (found + 1) * by):
            return found
    return None


def floor_bounds(low: Whole, high: Whole, by: Whole) -> tuple[Whole, Whole]:
    """Bounds of `number // by` for numbers from `low` to `high`; they may be loose.

    Raises:
        NotProved: it may have either sign.
    """
    if isinstance(low, int) and isinstance(high, int) and isinstance(by, int):
        return low // by, high // by
    least = 0 if at_most(0, low) else low
    if not (at_most(least, 0) and at_most(-1, high) and at_most(1, by)):
        raise NotProved(f"the sign of numbers from {low} to {high}, or of {by}")
    quotient, rest = divided(high, by)
    for most in (quotient - 1, quotient):
        if is_below(rest + (quotient - most) * by, by):
            return least, most
    return least, high


def _whole(terms: Mapping[Product, int]) -> Whole:
    nonzero = tuple(sorted((product, scale) for product, scale in terms.items() if scale))
    if not nonzero:
        return 0
    is_known = len(nonzero) == 1 and not nonzero[0][0]
    return nonzero[0][1] if is_known else Polynomial(nonzero)


def _terms(number: Whole) -> tuple[tuple[Product, int], ...]:
    if isinstance(number, Polynomial):
        return number.terms
    return (((), number),) if number else ()


def _order(term: tuple[Product, int]) -> tuple[int, Product]:
    """A monomial order: by degree, then by the symbols."""
    product, _ = term
    return len(product), product


def _spelled(product: Product, scale: int) -> str:
    names = [factor.name for factor in product]
    return "*".join(names if scale == 1 and names else [str(scale), *names])
