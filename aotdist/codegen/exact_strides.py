"""Operators that are bound to the strides of their arguments, for a compiler that lays its own results out.

Products in 8 bits take one matrix by rows and the other by columns, and what a user registers may read memory
as it lies. Inductor keeps the strides that eager has for such operators if it is told them.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from aotdist.torch_seam.inductor import EAGER_ARGUMENTS, needs_exact_strides


def tell_strides(gm: GraphModule) -> None:
    """Tell Inductor what operators that are bound to strides are given in eager, in place."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and needs_exact_strides(node.target):
            node.meta[EAGER_ARGUMENTS] = map_arg((node.args, node.kwargs), _val)


def _val(node: Node) -> Any:
    return node.meta.get("val")
