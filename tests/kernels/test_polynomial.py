"""Numbers that differ from call to call: arithmetic is Python's, and what is said holds in every call."""

import itertools
import math
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from aotdist.kernels.index import Index, Quotient, Remainder, Var, flat, number, unflat, variable
from aotdist.kernels.polynomial import (
    NotProved,
    Polynomial,
    Whole,
    at_most,
    common_divisor,
    divided,
    divides,
    floor,
    floor_bounds,
    hint_of,
    names_in,
    number_at,
    symbol,
)

A, B, C = (symbol(name, least=least, hint=5) for name, least in (("a", 2), ("b", 2), ("c", 0)))
CALLS = [
    dict(zip("abc", numbers, strict=True)) for numbers in itertools.product((2, 3, 8), (2, 5), (0, 1, 4))
]

atoms = st.one_of(st.sampled_from([A, B, C]), st.integers(-4, 6))
wholes = st.recursive(
    atoms,
    lambda parts: st.tuples(st.sampled_from("+-*"), parts, parts).map(lambda both: combined(*both)),
    max_leaves=6,
)


def combined(op: str, one: Whole, other: Whole) -> Whole:
    match op:
        case "+":
            return one + other
        case "-":
            return one - other
        case _:
            return one * other


@given(st.sampled_from("+-*"), wholes, wholes)
def test_arithmetic_is_that_of_numbers(op: str, one: Whole, other: Whole) -> None:
    for call in CALLS:
        expected = combined(op, number_at(one, call), number_at(other, call))
        assert number_at(combined(op, one, other), call) == expected


@given(wholes, wholes)
def test_what_is_said_holds_in_every_call(one: Whole, other: Whole) -> None:
    if at_most(one, other):
        assert all(number_at(one, call) <= number_at(other, call) for call in CALLS)
    if other != 0 and divides(other, one):
        assert all(
            number_at(one, call) == 0 or number_at(one, call) % number_at(other, call) == 0
            for call in CALLS
            if number_at(other, call)
        )
    if other != 0:
        quotient, rest = divided(one, other)
        assert quotient * other + rest == one
    if one != 0 and other != 0:
        shared = common_divisor(one, other)
        assert divides(shared, one) and divides(shared, other)


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(wholes, wholes, wholes)
def test_quotients_are_bounded(low: Whole, more: Whole, by: Whole) -> None:
    assume(at_most(0, more) and at_most(1, by))
    high = low + more
    same = floor(low, high, by)
    try:
        least, most = floor_bounds(low, high, by)
    except NotProved:
        least, most = low * 0 - 10**9, low * 0 + 10**9
    for call in CALLS:
        ends = [number_at(end, call) // number_at(by, call) for end in (low, high)]
        assert number_at(least, call) <= ends[0] and ends[1] <= number_at(most, call)
        if same is not None:
            assert ends == [number_at(same, call)] * 2


def test_sizes_are_never_ordered_by_guessing() -> None:
    assert at_most(A, A * B) and at_most(3, 4 * A - 1) and at_most(C, A * C)
    assert not at_most(A, B) and not at_most(B, A) and not at_most(1, C)


def test_a_number_knows_its_symbols_and_its_hint() -> None:
    half = symbol("(a // 2)", ["a"], least=1, hint=2)
    assert names_in([half * B, 3]) == {"a", "b"}
    assert hint_of(half * B - 1) == 9
    assert number_at(half * B, {"a": 9, "b": 3}) == 12
    assert str(A * B * 2 - C + 1) == "2*a*b - 1*c + 1"
    assert isinstance(A - A + 3, int)


def at(index: Index, places: dict[Var, int], call: dict[str, int]) -> int:
    """The value of an index, in numbers."""
    total = number_at(index.constant, call)
    for atom, scale in index.terms:
        match atom:
            case Var():
                value = places[atom]
            case Quotient(of, by):
                value = at(of, places, call) // number_at(by, call)
            case Remainder(of, by):
                value = at(of, places, call) % number_at(by, call)
            case _:
                raise AssertionError(atom)
        total += value * number_at(scale, call)
    return total


SIZES = [
    (A, B, 4),
    (A * B, 4),
    (4 * A, B),
    (A, 4 * B),
    (4, A * B),
    (4 * A * B,),
    (2 * A, 2 * B),
    (B, A, 2, 2),
]


@given(st.lists(st.sampled_from(SIZES), min_size=2, max_size=4), st.data())
def test_reshapes_are_those_of_numbers(shapes: list[tuple[Whole, ...]], data: Any) -> None:
    call = data.draw(st.sampled_from(CALLS))
    space = tuple(Var("x", dim, size) for dim, size in enumerate(shapes[0]))
    place = tuple(map(variable, space))
    for before, after in itertools.pairwise(shapes):
        place = unflat(flat(place, before), after)
    index = flat(place, shapes[-1])
    numbers = [range(number_at(var.size, call)) for var in space]
    for expected, where in enumerate(itertools.product(*numbers)):
        places = dict(zip(space, where, strict=True))
        assert at(index, places, call) == expected
        assert at(index, places, call) <= number_at(index.bounds[1], call)


def test_what_reshapes_take_apart_cancels() -> None:
    i, j, k = (variable(Var("x", at, size)) for at, size in enumerate((A, B, 4)))
    assert unflat(flat((i, j, k), (A, B, 4)), (A * B, 4)) == (i * B + j, k)
    assert unflat(flat((i * B + j, k), (A * B, 4)), (A, B, 4)) == (i, j, k)
    assert flat(unflat(variable(Var("x", 0, A * B)), (A, B)), (A, B)) == variable(Var("x", 0, A * B))
    assert (i * B + j) // B == i and (i * B + j) % B == j and (j * A + i) // B != number(0)
    assert math.prod((A, B), start=2) == 2 * A * B and isinstance(A * B, Polynomial)
