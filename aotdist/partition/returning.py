"""A graph with other results."""

from __future__ import annotations

from collections.abc import Sequence

from aotdist.partition.builder import GraphBuilder
from aotdist.program import Graph, Slot


def returning(graph: Graph, outs: Sequence[Slot]) -> Graph:
    """`graph` with these of its results, and no more than they need but arguments."""
    builder = GraphBuilder(graph.gm)
    named = graph.named_results()
    order = [node for node in graph.gm.graph.nodes if node.op != "output"]
    found = [named[slot] for slot in outs]
    needed = graph.ancestors(node for node in found if node is not None)
    for node in order:
        if node.op == "placeholder":
            builder.placeholder(node)
        elif node in needed:
            builder.copy(node)
    results = [None if node is None else builder.env[node] for node in found]
    return builder.finish(results, graph.ins, tuple(outs))
