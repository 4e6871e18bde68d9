"""Index arithmetic equals Python's, and cancels what reshapes take apart."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from aotdist.kernels.index import (
    Atom,
    Index,
    Quotient,
    Remainder,
    Var,
    contiguous_strides,
    flat,
    number,
    unflat,
    variable,
    visits_each_once,
)

SPACE = (Var("x", 0, 3), Var("x", 1, 4), Var("r", 0, 6))


def value(index: Index, at: dict[Var, int]) -> int:
    return index.constant + sum(scale * atom_value(atom, at) for atom, scale in index.terms)


def atom_value(atom: Atom, at: dict[Var, int]) -> int:
    match atom:
        case Var():
            return at[atom]
        case Quotient(of, by):
            return value(of, at) // by
        case Remainder(of, by):
            return value(of, at) % by
        case _:
            raise AssertionError(atom)


def everywhere():
    for numbers in itertools.product(*(range(var.size) for var in SPACE)):
        yield dict(zip(SPACE, numbers, strict=True))


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(SPACE), st.integers(-6, 24)),
        st.tuples(st.sampled_from(["divide", "remainder", "multiply", "shift"]), st.integers(1, 12)),
    ),
    min_size=1,
    max_size=8,
)


@given(steps)
def test_arithmetic_is_that_of_numbers(chosen):
    index, expected = number(0), [0] * math.prod(var.size for var in SPACE)
    points = list(everywhere())
    for step in chosen:
        match step:
            case ("add", var, scale):
                index = index + variable(var) * scale
                expected = [old + at[var] * scale for old, at in zip(expected, points, strict=True)]
            case ("divide", by):
                index, expected = index // by, [old // by for old in expected]
            case ("remainder", by):
                index, expected = index % by, [old % by for old in expected]
            case ("multiply", by):
                index, expected = index * by, [old * by for old in expected]
            case ("shift", by):
                index, expected = index + by, [old + by for old in expected]
    low, high = index.bounds
    for at, known in zip(points, expected, strict=True):
        assert value(index, at) == known
        assert low <= known <= high


def shapes_of(count: int) -> st.SearchStrategy[list[int]]:
    factors = [p for p in (2, 3, 5) for _ in range(6) if count % p == 0]
    return st.permutations(factors).map(lambda order: regroup(order, count))


def regroup(order: list[int], count: int) -> list[int]:
    sizes: list[int] = []
    for factor in order:
        if count % factor == 0:
            sizes.append(factor)
            count //= factor
    return [*sizes, count]


def over(sizes: list[int]) -> tuple[Index, ...]:
    return tuple(variable(Var("x", k, size)) for k, size in enumerate(sizes))


@given(shapes_of(64), shapes_of(64))
def test_a_reshape_and_its_inverse_cancel(sizes, others):
    there = unflat(flat(over(sizes), sizes), others)
    assert unflat(flat(there, others), sizes) == over(sizes)


@given(shapes_of(360), shapes_of(360))
def test_a_reshape_leaves_elements_where_they_are(sizes, others):
    place = flat(over(sizes), sizes)
    assert flat(unflat(place, others), others) == place


def test_rows_and_columns_of_a_merged_dimension_are_one_access():
    batch, time, head, dim = (variable(Var("x", k, size)) for k, size in enumerate((2, 8, 4, 16)))
    row, column = unflat(flat((batch, time, head, dim), (2, 8, 4, 16)), (16, 64))
    assert str(row * 64 + column) == "512*x0 + 64*x1 + 16*x2 + x3"


def test_a_space_that_visits_each_element_once():
    x, y = Var("x", 0, 3), Var("x", 1, 4)
    both = (variable(x), variable(y))
    assert visits_each_once(both, (3, 4), (x, y))
    assert visits_each_once(both[::-1], (4, 3), (x, y))
    assert not visits_each_once((both[0], both[0]), (3, 3), (x, y))
    assert not visits_each_once((both[0], number(0)), (3, 4), (x, y))
    assert not visits_each_once((both[0], both[1] + 1), (3, 5), (x, y))
    assert not visits_each_once((both[1],), (4,), (x, y))


def test_strides_of_contiguous_memory():
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides(()) == ()
