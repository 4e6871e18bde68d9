"""Lets a backward that runs operator by operator take tangents of any strides.

A tangent is recorded with the strides of its output, and may arrive expanded or transposed. Copying it
first would do, but eager does not: a reduction over other strides adds up in another order. So the graph
takes it as it comes. What the trace decided by strides is only which `reshape` is a `view`; autograd's own
formulas say `reshape`, and so does the graph, for whatever depends on a tangent.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from aotdist.codegen.graph_copy import copied
from aotdist.program import GRADIENT_ROLES, Graph
from aotdist.torch_seam import HigherOrderOperator

_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default)
_BOUND_TO_STRIDES = (_ATEN.as_strided.default, _ATEN.as_strided_scatter.default, _ATEN.view.dtype)


def takes_any_strides(backward: Graph) -> bool:
    """Whether nothing that depends on a tangent spells out strides."""
    return not any(
        node.target in _BOUND_TO_STRIDES or isinstance(node.target, HigherOrderOperator)
        for node in _after_tangents(backward)
    )


def with_reshapes(backward: Graph) -> Graph:
    """`backward` with a `reshape` for each `view` that depends on a tangent."""
    loose = Graph(copied(backward), backward.ins, backward.outs)
    for node in _after_tangents(loose):
        if node.target in _VIEWS:
            node.target = _ATEN.reshape.default
    return loose


def _after_tangents(graph: Graph) -> list[Node]:
    reached = {node for slot, node in graph.named_placeholders().items() if slot.role in GRADIENT_ROLES}
    for node in graph.gm.graph.nodes:
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return [node for node in graph.gm.graph.nodes if node in reached and node.op == "call_function"]
