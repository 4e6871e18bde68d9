"""Writes through strides, for a compiler that runs its graphs on arguments that require grad.

`as_strided_scatter` refuses such a tensor if it has gaps or is transposed (torch 2.13), also where nothing is
recorded.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

_SCATTER = torch.ops.aten.as_strided_scatter.default


def detach_what_is_written(gm: GraphModule) -> None:
    """Let what the graph writes through strides be detached first, if it is an argument, in place."""
    for node in gm.graph.find_nodes(op="call_function", target=_SCATTER):
        written = node.args[0]
        if isinstance(written, Node) and written.op == "placeholder":
            with gm.graph.inserting_before(node):
                detached = gm.graph.call_function(torch.ops.aten.detach.default, (written,))
            detached.meta = dict(written.meta)
            node.replace_input_with(written, detached)
