"""Node cuts against trying all of them."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from aotdist.partition.min_cut import NEVER, Network


@st.composite
def networks(draw: st.DrawFn) -> Network:
    n = draw(st.integers(1, 7))
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    costs = st.lists(st.integers(0, 9), min_size=n, max_size=n)
    sources = draw(st.lists(st.sampled_from([0, 0, 1, 2, NEVER]), min_size=n, max_size=n))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    needed = draw(st.lists(st.integers(0, n - 1), unique=True))
    return Network(draw(costs), sources, edges, needed)


def cost(network: Network, cut: set[int]) -> int:
    """Of cutting these items, and leaving uncut what else the sink needs."""
    again: set[int] = set()
    pending = [i for i in network.needed if i not in cut]
    while pending:
        item = pending.pop()
        if item not in again:
            again.add(item)
            pending += [a for a, b in network.edges if b == item and a not in cut]
    return sum(network.save_cost[i] for i in cut) + sum(network.again_cost[i] for i in again)


@given(networks())
def test_no_cut_is_cheaper(network: Network) -> None:
    items = range(len(network.save_cost))
    every = itertools.chain.from_iterable(itertools.combinations(items, k) for k in range(len(items) + 1))
    assert cost(network, set(network.cut())) == min(cost(network, set(c)) for c in every)


def test_a_byte_outweighs_every_tie_however_large_the_values_are() -> None:
    tie, byte = 1, 1001
    sizes = [600 * 10**9, 500 * 10**9, 500 * 10**9 + 1]
    network = Network(
        save_cost=[size * byte for size in sizes],
        again_cost=[NEVER, 0, 1000 * tie],
        edges=[(0, 1), (1, 2)],
        needed=[2],
    )
    assert network.cut() == [1]


def test_what_several_need_is_filled_once_with_what_is_left() -> None:
    """The first item's flow takes a way that the second needs, and finds another."""
    network = Network(
        save_cost=[3, 5, 9, 9], again_cost=[NEVER, NEVER, 0, 0], edges=[(0, 2), (1, 2), (0, 3)], needed=[2, 3]
    )
    assert network.cut() == [0, 1]


def test_an_empty_network_has_an_empty_cut() -> None:
    assert Network([], [], [], []).cut() == []
