"""Partitioning a graph of a 64-layer model's size stays cheap."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from aotdist.partition import partition
from aotdist.partition.policy import Policy
from aotdist.program import Graph, Slot
from aotdist.torch_seam.functional import FakeTensorMode
from tests.work import calls_of

ATEN = torch.ops.aten
LAYERS, NODES = 64, 40_000
CALLS_PER_NODE = {"default": 160, "min_cut": 230}
"""A fifth more than it takes today; the joint graph's nodes are counted."""


def deep_joint(nodes: int) -> Graph:
    """Layers of matmuls with pointwise operators between, and a backward that reads all of them."""
    graph = torch.fx.Graph()
    with FakeTensorMode():
        value = torch.empty(16, 16)

    def node(make: Callable[..., Any], *args: Any, phase: str) -> Any:
        made = make(*args)
        made.meta.update(val=value, phase=phase)
        return made

    def call(phase: str, target: Any, *args: Any) -> Any:
        return node(graph.call_function, target, args, phase=phase)

    weights = [node(graph.placeholder, f"w{i}", phase="forward") for i in range(LAYERS)]
    tangent = node(graph.placeholder, "t", phase="forward")
    per_layer = nodes // LAYERS // 4
    h, forward = weights[0], []
    for weight in weights:
        residual = h
        for step in range(per_layer):
            h = (
                call("forward", ATEN.mm.default, h, weight)
                if step % 10 == 0
                else call("forward", ATEN.sin.default, h)
            )
            forward.append((h, weight))
        h = call("forward", ATEN.add.Tensor, h, residual)
    g, grads = tangent, dict.fromkeys(weights)
    for value_node, weight in reversed(forward):
        view = call("backward", ATEN.view.default, g, [16, 16])
        g = call("backward", ATEN.mul.Tensor, view, value_node)
        grads[weight] = call("backward", ATEN.add.Tensor, g, weight)
    graph.output((h, *grads.values()))
    ins = (*(Slot("primal", f"w{i}") for i in range(LAYERS)), Slot("tangent", "t"))
    outs = (Slot("output", "out"), *(Slot("grad", f"w{i}") for i in range(LAYERS)))
    return Graph(torch.fx.GraphModule(torch.nn.Module(), graph), ins, outs)


@pytest.mark.parametrize("policy", [pytest.param("default", marks=pytest.mark.sweep), "min_cut"])
def test_work_grows_with_the_nodes_and_no_faster(policy: Policy) -> None:
    small, large = deep_joint(NODES // 4), deep_joint(NODES)
    assert len(large.gm.graph.nodes) > 0.95 * NODES
    partition(small, policy)  # fills the caches of operator traits
    calls = calls_of(lambda: partition(large, policy))
    assert calls < 4.5 * calls_of(lambda: partition(small, policy))
    assert calls < CALLS_PER_NODE[policy] * NODES
