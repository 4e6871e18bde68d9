"""Node cuts against trying all of them, and costs that int32 cannot hold."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotdist.partition.min_cut import Network, Scale

INT32 = 2**31 - 1


@st.composite
def networks(draw: st.DrawFn) -> Network:
    n = draw(st.integers(1, 7))
    infinite = 1000
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    costs = st.lists(st.integers(0, 9), min_size=n, max_size=n)
    sources = draw(st.lists(st.sampled_from([0, 0, 1, 2, infinite]), min_size=n, max_size=n))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    needed = draw(st.lists(st.integers(0, n - 1), unique=True))
    return Network(draw(costs), sources, edges, needed, infinite)


def cost(network: Network, cut: set[int]) -> int:
    """Of cutting these items, and leaving uncut what else the sink needs."""
    again: set[int] = set()
    pending = [i for i in network.needed if i not in cut]
    while pending:
        item = pending.pop()
        if item not in again:
            again.add(item)
            pending += [a for a, b in network.edges if b == item and a not in cut]
    return sum(network.save_cost[i] for i in cut) + sum(network.source_cost[i] for i in again)


@given(networks())
def test_no_cut_is_cheaper(network: Network) -> None:
    items = range(len(network.save_cost))
    every = itertools.chain.from_iterable(itertools.combinations(items, k) for k in range(len(items) + 1))
    assert cost(network, set(network.cut())) == min(cost(network, set(c)) for c in every)


@pytest.mark.parametrize("num_bytes", [0, 1, 10**6, 2**31 - 1, 2**31, 10**11, 10**14])
def test_scaled_costs_fit(num_bytes: int) -> None:
    scale = Scale.fitting(num_bytes, num_ties=50_000)
    assert scale.units(num_bytes) <= scale.infinite <= INT32
    assert scale.units(num_bytes) + 50_000 < scale.infinite + 50_000 <= INT32


def test_a_byte_outweighs_every_tie_where_there_is_room() -> None:
    scale = Scale.fitting(10**4, num_ties=1000)
    assert scale.units(1) > 1000


def test_hundreds_of_gigabytes_are_cut_in_the_right_place() -> None:
    sizes = [60 * 10**9, 40 * 10**9, 50 * 10**9]
    scale = Scale.fitting(sum(sizes), num_ties=3)
    network = Network(
        save_cost=[scale.units(size) for size in sizes],
        source_cost=[scale.infinite, 0, 0],
        edges=[(0, 1), (1, 2)],
        needed=[2],
        infinite=scale.infinite,
    )
    assert network.cut() == [1]


def test_a_cost_beyond_int32_is_refused() -> None:
    with pytest.raises(OverflowError, match="int32"):
        Network([2**31], [1], [], [0], 1).cut()


def test_an_empty_network_has_an_empty_cut() -> None:
    assert Network([], [], [], [], 1).cut() == []
