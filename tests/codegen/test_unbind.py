"""Complete sets of selects become one unbind; anything else stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from aotdist.codegen.rewrites import rejoin_selects
from aotdist.program import Graph, Slot
from aotdist.torch_seam.proxies import make_fx


def graph_of(fn: Callable[..., list[torch.Tensor]], x: torch.Tensor) -> Graph:
    gm = make_fx(lambda x: tuple(fn(x)), tracing_mode="fake")(x)
    (results,) = gm.graph.output_node().args
    outs = tuple(Slot("output", f"out[{k}]") for k in range(len(results)))
    return Graph(gm, (Slot("primal", "x"),), outs)


def targets(graph: Graph) -> list[str]:
    return [str(node.target) for node in graph.gm.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_complete_set_is_one_operator_with_the_same_views(dim: int) -> None:
    x = torch.randn(5, 6)
    graph = graph_of(lambda x: [x.select(dim, k) for k in reversed(range(x.size(dim)))], x)
    rejoined = rejoin_selects(graph)
    assert targets(rejoined).count("aten.unbind.int") == 1 and "aten.select.int" not in targets(rejoined)
    for ours, before in zip(rejoined.gm(x), graph.gm(x), strict=True):
        assert torch.equal(ours, before) and ours.stride() == before.stride()
        assert ours.data_ptr() == before.data_ptr()
    assert "aten.unbind.int" not in targets(graph)


def test_negative_and_repeated_indices_count() -> None:
    x = torch.randn(4, 2)
    graph = graph_of(lambda x: [x[0], x[-1], x[1], x[2] * 2, x[-4]], x)
    rejoined = rejoin_selects(graph)
    assert "aten.unbind.int" in targets(rejoined)
    assert all(torch.equal(a, b) for a, b in zip(rejoined.gm(x), graph.gm(x), strict=True))


@pytest.mark.parametrize("size", [3, 6])
def test_few_or_incomplete_sets_stay(size: int) -> None:
    graph = graph_of(lambda x: [x[k] for k in range(size - (size > 3))], torch.randn(size, 2))
    assert rejoin_selects(graph) is graph
