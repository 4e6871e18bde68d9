"""Overlap: where starts and waits stand, and that nothing else changes."""

import torch
from torch.fx import Node

from aotdist.partition import partition
from aotdist.partition.traits import is_collective
from aotdist.passes.bucket import GATHER, REDUCE, SCATTER, bucket
from aotdist.passes.collectives import collectives, wait_of
from aotdist.passes.overlap import overlap
from aotdist.program import Graph, Split
from aotdist.settings import Settings
from tests.passes.fsdp_graphs import Layout, record_mlp

ATEN = torch.ops.aten
UNITS = [[(4, 4), (4, 4)] for _ in range(4)]
SETTINGS = Settings()


def ordered(graph: Graph, merge: bool = True) -> Graph:
    return overlap(bucket(graph, SETTINGS) if merge else graph, SETTINGS)


def split_of(replicas: int = 1) -> Split:
    return partition(record_mlp(UNITS, Layout(2, replicas)), "default")


def sequence(graph: Graph) -> list[tuple[object, ...]]:
    return [(c.group, c.unit, *c.fingerprint()) for c in collectives(graph)]


def starts(graph: Graph, op: object) -> list[Node]:
    return graph.gm.graph.find_nodes(op="call_function", target=op)


def waits(graph: Graph, op: object) -> list[Node]:
    found = [wait_of(start) for start in starts(graph, op)]
    return [wait for wait in found if wait is not None]


def matmuls_of_unit(graph: Graph, unit: int) -> list[Node]:
    matmuls = starts(graph, ATEN.mm.default)
    size = len(matmuls) // len(UNITS)
    return matmuls[unit * size : (unit + 1) * size]


def test_the_next_unit_is_gathered_while_this_one_computes() -> None:
    forward = ordered(split_of().forward)
    gathers, gathered = starts(forward, GATHER), waits(forward, GATHER)
    for unit in range(len(UNITS) - 1):
        assert gathers[unit + 1] < gathered[unit] < matmuls_of_unit(forward, unit)[0]
        assert matmuls_of_unit(forward, unit)[-1] < gathered[unit + 1]


def test_at_most_two_units_are_gathered_at_a_time() -> None:
    forward = ordered(split_of().forward)
    for unit, start in enumerate(starts(forward, GATHER)[2:]):
        assert matmuls_of_unit(forward, unit)[-1] < start


def test_the_backward_gathers_ahead_in_its_own_order() -> None:
    backward = ordered(split_of().backward)
    units = [start.meta["unit"] for start in starts(backward, GATHER)]
    assert units == ["layers.3", "layers.2", "layers.1", "layers.0"]
    first = starts(backward, GATHER)[0]
    assert all(first < node for node in starts(backward, ATEN.mm.default))


def test_a_reduction_is_waited_for_when_the_next_has_started() -> None:
    backward = ordered(split_of().backward)
    scatters, done = starts(backward, SCATTER), waits(backward, SCATTER)
    for start, following, wait in zip(scatters, scatters[1:], done, strict=False):
        assert start < following < wait
    for later, wait in zip(scatters[2:], done, strict=False):
        assert wait < later  # one in flight when another starts, not two


def test_the_last_reduction_is_waited_for_at_the_end() -> None:
    backward = ordered(split_of().backward)
    behind = [n for n in backward.gm.graph.nodes if waits(backward, SCATTER)[-1] < n and n.op != "output"]
    assert all(
        n.target in (ATEN.view.default, ATEN.split_with_sizes.default) or "getitem" in n.name for n in behind
    )


def test_all_reductions_among_replicas_are_delayed_too() -> None:
    backward = ordered(split_of(replicas=2).backward)
    reduces, done = starts(backward, REDUCE), waits(backward, REDUCE)
    for start, following, wait in zip(reduces, reduces[1:], done, strict=False):
        assert start < following < wait


def test_without_buckets_a_unit_still_moves_as_one() -> None:
    forward = ordered(split_of().forward, merge=False)
    gathers, gathered = starts(forward, GATHER), waits(forward, GATHER)
    for unit in range(len(UNITS) - 1):
        following = gathers[2 * unit + 2 : 2 * unit + 4]
        assert all(start < gathered[2 * unit] for start in following)


def test_only_the_order_changes() -> None:
    merged = bucket(split_of().backward, SETTINGS)
    moved = overlap(merged, SETTINGS)
    assert {n.name for n in merged.gm.graph.nodes} == {n.name for n in moved.gm.graph.nodes}
    assert moved.gm.code != merged.gm.code
    assert merged.gm.code == bucket(split_of().backward, SETTINGS).gm.code


def test_every_rank_orders_alike_although_only_some_pad() -> None:
    units, layout = [[(5, 4), (4, 5)], [(3, 4), (2, 3)], [(7, 2)]], Layout(2)
    splits = [partition(record_mlp(units, layout, rank=rank), "default") for rank in range(2)]
    assert [len(s.backward.gm.graph.nodes) for s in splits][0] != len(splits[1].backward.gm.graph.nodes)
    for first, second in zip(*((s.forward, s.backward) for s in splits), strict=True):
        sequences = [sequence(ordered(half)) for half in (first, second)]
        assert sequences[0] == sequences[1]


def test_the_order_within_a_group_is_the_same_at_every_run() -> None:
    first, second = (ordered(split_of().backward) for _ in range(2))
    assert sequence(first) == sequence(second)


def test_collectives_without_a_unit_stay_where_they_are() -> None:
    graph = split_of().forward
    for node in graph.gm.graph.nodes:
        node.meta.pop("unit", None)
    assert overlap(graph, SETTINGS) is graph


def test_draws_keep_their_order() -> None:
    graph = split_of().forward
    last = starts(graph, GATHER)[-1]
    with graph.gm.graph.inserting_before(last):
        source = last.all_input_nodes[0]
        noise = graph.gm.graph.call_function(ATEN.rand_like.default, (source,))
        noise.meta = dict(source.meta)
    last.replace_input_with(source, noise)
    moved = ordered(graph, merge=False)
    assert is_collective(starts(moved, GATHER)[-1])
    names = [n.name for n in moved.gm.graph.nodes]
    assert names.index(noise.name) > names.index(starts(moved, ATEN.tanh.default)[0].name)
