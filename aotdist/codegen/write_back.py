"""Lets a compiler store new values of inputs where the inputs lie.

A functional graph returns the new value of an input, which is copied there after it has run. A compiler that
knows of the copy stores the value at once, behind whoever reads the old one, and nothing is left to copy: for
AdamW that is 24 of 52 bytes that are moved for each float32 parameter.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from aotdist.program import Graph
from aotdist.torch_seam.symbols import surely_equal

_COPY = torch.ops.aten.copy_.default


def write_back(gm: GraphModule, graph: Graph) -> None:
    """Copy the results of role `write` into the arguments that they are new values of, and return these.

    Args:
        gm: a private copy of the graph's module.
        graph: names its arguments and results.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    arguments = {
        (slot.path, slot.inner): node
        for slot, node in zip(graph.ins, placeholders, strict=True)
        if slot.role == "primal"
    }
    output = gm.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    for at, slot in enumerate(graph.outs):
        new, argument = results[at], arguments.get((slot.path, slot.inner))
        if (
            slot.role == "write"
            and isinstance(new, Node)
            and argument is not None
            and _lie_alike(argument, new)
        ):
            with gm.graph.inserting_before(output):
                copy = gm.graph.call_function(_COPY, (argument, new))
            copy.meta = dict(new.meta)
            results[at] = argument
    output.args = (tuple(results),)


def _lie_alike(argument: Node, new: Node) -> bool:
    """Whether an argument has no gaps and no element twice, and its new value is of its kind."""
    a, b = argument.meta["val"], new.meta["val"]
    if argument is new or (a.dtype, a.device) != (b.dtype, b.device) or a.dim() != b.dim():
        return False
    has_no_gaps = surely_equal(torch.empty_like(a).stride(), a.stride())
    return has_no_gaps and surely_equal(a.shape, b.shape)
