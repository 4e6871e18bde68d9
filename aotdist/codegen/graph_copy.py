"""Graphs are frozen; compilers are not careful. They work on copies."""

from __future__ import annotations

import copy

from torch.fx import GraphModule

from aotdist.program import Graph
from aotdist.torch_seam.proxies import graph_module


def copied(graph: Graph) -> GraphModule:
    """`graph.gm` with nodes of its own: rewiring them, or changing their `meta`, leaves the graph alone.

    Tensors, fake values and submodules are shared.
    """
    return graph_module(graph.gm, copy.deepcopy(graph.gm.graph))
