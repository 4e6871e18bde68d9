"""Sets of stretches of time, beside sets of whole numbers."""

from hypothesis import given
from hypothesis import strategies as st

from aotdist.report.lanes import Span, Stretches, minus, outermost, stretches, total, union, within

pairs = st.tuples(st.integers(0, 30), st.integers(0, 6))
sets = st.lists(pairs.map(lambda pair: (float(pair[0]), float(sum(pair)))), max_size=6)


def moments(these: Stretches) -> set[int]:
    """The whole numbers at which they go on."""
    return {moment for start, end in these for moment in range(int(start), int(end))}


def joined(these: Stretches) -> Stretches:
    return stretches(Span("", *pair) for pair in these)


@given(sets, sets)
def test_they_are_sets(one, other):
    these, those = joined(one), joined(other)
    assert moments(these) == moments(one)
    assert moments(union(these, those)) == moments(one) | moments(other)
    assert moments(minus(these, those)) == moments(one) - moments(other)
    assert moments(within(these, those)) == moments(one) & moments(other)
    assert total(these) == len(moments(one))


@given(sets, sets)
def test_they_are_in_order_and_apart(one, other):
    for found in (union(joined(one), joined(other)), minus(joined(one), joined(other))):
        assert all(start < end for start, end in found)
        assert all(before[1] <= after[0] for before, after in zip(found, found[1:], strict=False))


def test_outermost_spans_are_those_that_no_other_of_their_thread_holds():
    outer, inner, after = Span("outer", 0, 10, 1), Span("inner", 2, 5, 1), Span("after", 10, 12, 1)
    elsewhere = Span("elsewhere", 3, 4, 2)
    assert [*outermost([inner, after, elsewhere, outer])] == [outer, elsewhere, after]
