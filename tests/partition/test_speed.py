"""Partitioning a graph of a 64-layer model's size stays cheap."""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aotdist.partition import partition
from aotdist.partition.policy import Policy
from aotdist.program import Graph, Slot
from aotdist.torch_seam import FakeTensorMode

ATEN = torch.ops.aten
LAYERS, NODES = 64, 40_000


@functools.cache
def deep_joint() -> Graph:
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
    per_layer = NODES // LAYERS // 4
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


@pytest.mark.parametrize(("policy", "seconds"), [("default", 1.5), ("min_cut", 3.0)])
def test_forty_thousand_nodes(policy: Policy, seconds: float) -> None:
    """CPU time of this process: on a busy machine the wall clock says little."""
    joint = deep_joint()
    assert len(joint.gm.graph.nodes) > 0.95 * NODES
    partition(joint, policy)  # imports scipy, fills the caches of operator traits
    started = time.process_time()
    partition(joint, policy)
    assert time.process_time() - started < seconds
