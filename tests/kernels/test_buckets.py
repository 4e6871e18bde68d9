"""What goes into the buckets of collectives, and comes out of them, is one launch or two a bucket."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Node

from aotdist.codegen.triton import Launch, with_kernels
from aotdist.kernels.emission import Fused
from aotdist.partition.traits import is_view, is_wait
from aotdist.passes.bucket import GATHER, SCATTER
from aotdist.passes.run import Stage
from aotdist.program import Graph
from tests.passes.fsdp_graphs import Layout
from tests.passes.lockstep import run_ranks
from tests.passes.test_bucket import bucketed, groups, random_arguments, split_of

UNITS = [[(64, 32), (32, 64), (128, 32)], [(64, 128), (32, 64)]]
LAYOUTS = {
    "float32": Layout(world=2),
    "bf16": Layout(world=2, param_dtype=torch.bfloat16),
    "padded": Layout(world=3, param_dtype=torch.bfloat16),
}
HALVES: tuple[Stage, ...] = ("forward", "backward")


def half_of(layout: Layout, half: Stage, rank: int = 0) -> Graph:
    split = split_of(layout, units=UNITS, rank=rank)
    return bucketed(split.forward if half == "forward" else split.backward)


def fused(graph: Graph) -> Fused:
    return with_kernels(graph, keeps_casts=True, label="test")


def calls(made: Fused) -> list[Node]:
    return [node for node in made.graph.gm.graph.nodes if node.op == "call_function"]


def behind_views(node: Node) -> Node:
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("half", HALVES)
def test_one_launch_fills_a_bucket(layout: str, half: Stage) -> None:
    """What goes in is cast and padded on the way, and nothing is copied before."""
    starts = [
        node for node in calls(fused(half_of(LAYOUTS[layout], half))) if node.target in (GATHER, SCATTER)
    ]
    assert len(starts) == (2 if half == "forward" else 4)
    for start in starts:
        filling = behind_views(start.all_input_nodes[0])
        assert isinstance(filling.target, Launch)
        read = [behind_views(node) for node in filling.all_input_nodes]
        assert not any(isinstance(node.target, Launch) and node.name.startswith("c") for node in read)
        assert all(node.op == "placeholder" or node.name.startswith("mm") for node in read)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("half", HALVES)
def test_few_launches_empty_a_bucket_and_none_waits_for_another(layout: str, half: Stage) -> None:
    made = fused(half_of(LAYOUTS[layout], half))
    copies = [
        node for node in calls(made) if node.name.startswith("clone") and isinstance(node.target, Launch)
    ]
    assert len(copies) <= 4
    assert all(sum(map(is_wait, node.all_input_nodes)) == 1 for node in copies)
    assert not {"aten.split_with_sizes_copy.default", "aten._chunk_cat.default"} & {
        str(node.target) for node in made.reasons
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("half", HALVES)
def test_ranks_get_what_the_library_copies(layout: str, half: Stage) -> None:
    own = LAYOUTS[layout]
    graphs = [half_of(own, half, rank) for rank in range(own.world)]
    args = random_arguments(graphs)
    expected = run_ranks(graphs, args, groups(own))
    found = run_ranks([fused(graph).graph for graph in graphs], args, groups(own))
    error = 2e-2 if own.param_dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(found, expected, rtol=error, atol=error)
