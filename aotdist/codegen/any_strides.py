"""Lets a backward that runs operator by operator take tangents of any strides.

A tangent is recorded with the strides of its output, and may arrive expanded or transposed. Copying it
first would do, but eager does not: a reduction over other strides adds up in another order. So the graph
takes it as it comes. What the trace decided by strides is most often which `reshape` is a `view`; autograd's
own formulas say `reshape`, and so does the graph, for whatever depends on a tangent.

Some formulas say `contiguous`, of which a trace keeps nothing where it is so there, and their kernels rely on
it. With these, and where a backward of the user's looks at strides itself, tangents are copied first.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from aotdist.program import GRADIENT_ROLES, Graph
from aotdist.torch_seam.operators import HigherOrderOperator

_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default)
_BOUND_TO_STRIDES = (
    _ATEN.as_strided.default,
    _ATEN.as_strided_scatter.default,
    _ATEN.view.dtype,
    _ATEN.view_as_complex.default,
    _ATEN.view_as_real.default,
    _ATEN._cdist_backward.default,
    _ATEN._weight_norm_interface_backward.default,
    _ATEN.cudnn_batch_norm_backward.default,
    _ATEN.native_group_norm_backward.default,
)
"""What spells out strides, or is given a contiguous gradient by autograd's formulas."""


def takes_any_strides(backward: Graph) -> bool:
    """Whether nothing that depends on a tangent is bound to strides."""
    return not any(
        node.target in _BOUND_TO_STRIDES
        or isinstance(node.target, HigherOrderOperator)
        or "strides_asked" in node.meta
        for node in _with_tangents(backward)
    )


def with_reshapes(backward: Graph) -> Graph:
    """`backward` with a `reshape` for each `view` that depends on a tangent."""
    loose = backward.copied()
    for node in _with_tangents(loose):
        if node.target in _VIEWS:
            node.target = _ATEN.reshape.default
    return loose


def _with_tangents(graph: Graph) -> set[Node]:
    """The tangents, and what is computed from them."""
    named = graph.named_placeholders()
    return graph.descendants(node for slot, node in named.items() if slot.role in GRADIENT_ROLES)
