"""Merged collectives: the same bits, fewer nodes, and only what belongs together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aotdist.partition import partition
from aotdist.passes.bucket import GATHER, REDUCE, SCATTER, bucket
from aotdist.passes.collectives import collectives
from aotdist.passes.overlap import overlap
from aotdist.passes.verify import verify
from aotdist.program import Graph, Split
from aotdist.settings import Settings
from tests.partition.running import assert_same_bits
from tests.passes.fsdp_graphs import REPLICA_GROUP, SHARD_GROUP, Layout, Units, record_mlp
from tests.passes.lockstep import run_ranks

ATEN = torch.ops.aten
BF16, F32 = torch.bfloat16, torch.float32
TWO_UNITS = [[(8, 4), (4, 8)], [(6, 4), (2, 6)]]


def bucketed(graph: Graph, limit: int = 2**20) -> Graph:
    return bucket(graph, Settings(bucket_bytes=limit))


def targets(graph: Graph) -> list[object]:
    return [n.target for n in graph.gm.graph.nodes]


def split_of(layout: Layout, reshard: bool = True, units: Units = TWO_UNITS, rank: int = 0) -> Split:
    return partition(record_mlp(units, layout, reshard, rank), "default")


def groups(layout: Layout) -> dict[str, list[list[int]]]:
    """Ranks count through the shards of a replica first."""
    everyone = range(layout.world * layout.replicas)
    return {
        SHARD_GROUP: [list(everyone[r * layout.world :][: layout.world]) for r in range(layout.replicas)],
        REPLICA_GROUP: [list(everyone[s :: layout.world]) for s in range(layout.world)],
    }


def random_arguments(graphs: list[Graph]) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[_random_like(n.meta["val"], generator) for n in graph.placeholders()] for graph in graphs]


def _random_like(fake: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(fake.shape, generator=generator).to(fake.dtype)


def assert_run_alike(graphs: list[Graph], changed: list[Graph], layout: Layout) -> None:
    args = random_arguments(graphs)
    expected = run_ranks(graphs, args, groups(layout))
    for got, want in zip(run_ranks(changed, args, groups(layout)), expected, strict=True):
        assert_same_bits(got, want)


@st.composite
def chains(draw: st.DrawFn) -> Units:
    """Units of weights whose shapes fit one behind the other."""
    widths = st.integers(1, 9)
    units, columns = [], draw(widths)
    for _ in range(draw(st.integers(1, 3))):
        unit = []
        for _ in range(draw(st.integers(1, 3))):
            rows = draw(widths)
            unit.append((rows, columns))
            columns = rows
        units.append(unit)
    return units


@given(
    units=chains(),
    world=st.integers(1, 3),
    replicas=st.sampled_from([1, 2]),
    dtypes=st.sampled_from([(F32, F32), (BF16, F32), (BF16, BF16), (F32, BF16)]),
    reshard=st.booleans(),
    limit=st.sampled_from([1, 100, 400, 2**20]),
)
def test_same_bits_on_every_rank(
    units: Units,
    world: int,
    replicas: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    reshard: bool,
    limit: int,
) -> None:
    layout = Layout(world, replicas, *dtypes)
    splits = [split_of(layout, reshard, units, rank) for rank in range(world)] * replicas
    settings = Settings(bucket_bytes=limit)
    for halves in ([split.forward for split in splits], [split.backward for split in splits]):
        merged = [bucket(half, settings) for half in halves]
        ordered = [overlap(half, settings) for half in merged]
        for half in ordered:
            verify(half, after="overlap")
        assert_run_alike(halves, merged, layout)
        assert_run_alike(halves, ordered, layout)


def test_one_collective_a_unit() -> None:
    split = split_of(Layout(2))
    assert targets(bucketed(split.forward)).count(GATHER) == 2
    backward = bucketed(split.backward)
    assert targets(backward).count(GATHER) == 2  # the very first weight alone, the second unit's together
    assert targets(backward).count(SCATTER) == 2
    assert [c.unit for c in collectives(backward) if "reduce" in c.op] == ["layers.1", "layers.0"]


def test_replicas_reduce_what_was_scattered_without_another_copy() -> None:
    backward = bucketed(split_of(Layout(2, replicas=2)).backward)
    assert targets(backward).count(SCATTER) == targets(backward).count(REDUCE) == 2
    for node in backward.gm.graph.find_nodes(op="call_function", target=REDUCE):
        assert (
            node.all_input_nodes[0].all_input_nodes[0].target
            is torch.ops._c10d_functional.wait_tensor.default
        )
    assert targets(backward).count(ATEN.div.Tensor) == 2  # one a bucket, not one a parameter


def test_casts_are_done_once_a_bucket() -> None:
    split = split_of(Layout(2, param_dtype=BF16, reduce_dtype=F32))
    forward = bucketed(split.forward)
    gathers = forward.gm.graph.find_nodes(op="call_function", target=GATHER)
    assert all(g.all_input_nodes[0].target is ATEN._to_copy.default for g in gathers)
    scatters = bucketed(split.backward).gm.graph.find_nodes(op="call_function", target=SCATTER)
    assert all(s.all_input_nodes[0].target is ATEN._to_copy.default for s in scatters)


def test_no_bucket_exceeds_the_limit() -> None:
    split = split_of(Layout(2))
    for collective in collectives(bucketed(split.forward, limit=200)):
        assert collective.num_bytes <= 200


def test_a_collective_larger_than_the_limit_stays_alone() -> None:
    split = split_of(Layout(2))
    before = [c.num_bytes for c in collectives(split.forward)]
    assert [c.num_bytes for c in collectives(bucketed(split.forward, limit=1))] == before


def test_collectives_without_a_unit_are_left_alone() -> None:
    graph = split_of(Layout(2)).forward
    for node in graph.gm.graph.nodes:
        node.meta.pop("unit", None)
    assert bucketed(graph) is graph


def test_reductions_line_up_in_the_order_of_the_gradients() -> None:
    backward = bucketed(split_of(Layout(2), units=[[(8, 4), (4, 8), (2, 4)]]).backward)
    (scatter,) = backward.gm.graph.find_nodes(op="call_function", target=SCATTER)
    inputs = scatter.all_input_nodes[0].all_input_nodes
    assert [tuple(n.meta["val"].shape) for n in inputs] == [(8, 4), (4, 8), (2, 4)]
    results = [n for n in backward.results() if n is not None]
    pieces = [n if n.target is not ATEN.view.default else n.all_input_nodes[0] for n in results]
    assert [piece.args[1] for piece in pieces] == [0, 1, 2]


def test_a_gather_that_depends_on_another_is_not_merged_with_it() -> None:
    split = split_of(Layout(2), units=[[(4, 4), (4, 4)]])
    first, second = split.forward.gm.graph.find_nodes(op="call_function", target=GATHER)
    with split.forward.gm.graph.inserting_before(second):
        wait = next(iter(first.users))
        half = split.forward.gm.graph.call_function(ATEN.slice.Tensor, (wait, 0, 0, 2))
        half.meta["val"] = second.all_input_nodes[0].meta["val"]
    second.replace_input_with(second.all_input_nodes[0], half)
    assert targets(bucketed(split.forward)).count(GATHER) == 2


def test_the_given_graph_is_left_as_it_was() -> None:
    graph = split_of(Layout(2)).forward
    before = graph.gm.code
    bucketed(graph)
    assert graph.gm.code == before


@pytest.mark.parametrize("reshard", [True, False])
def test_a_unit_that_runs_twice_is_gathered_twice(reshard: bool) -> None:
    graph = split_of(Layout(2), reshard, units=[[(4, 4), (4, 4)], [(4, 4), (4, 4)]]).forward
    gathers = graph.gm.graph.find_nodes(op="call_function", target=GATHER)
    for again, first in zip(gathers[2:], gathers[:2], strict=True):
        again.meta["unit"] = "layers.0"
        again.replace_input_with(again.all_input_nodes[0], first.all_input_nodes[0])
    assert targets(bucketed(graph)).count(GATHER) == 2
