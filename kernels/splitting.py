"""Cuts a sum of everything in two: else one block would go through all of it, while the rest of a GPU waits.

`x.sum()` of a million elements becomes 1,024 sums of 1,024, each by a block of its own, and the sum of those.
What is summed is computed in the first stage, as before. Parts of narrow floating point are kept in float32.
The order of the additions is fixed by the sizes, so results do not differ from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from aotdist.kernels.ir import held
from aotdist.kernels.rule import sizes_of, val_of
from aotdist.kernels.rules import obstacle
from aotdist.torch_seam import OpOverload

aten = torch.ops.aten

MIN_ELEMENTS = 2**15
"""What one block goes through in the time of another launch, or so."""
MAX_PARTS = 1024
ROW_LENGTHS = range(512, 8193)
"""Of rows that are the parts, if there are no more than `MAX_ROWS`: then what computes them row by row, like
a norm before the largest element of all, may take the first stage with it."""
MAX_ROWS = 8192

_SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default}
_EXTREMES = {
    aten.amax.default: aten.amax.default,
    aten.amin.default: aten.amin.default,
    aten.max.default: aten.amax.default,
    aten.min.default: aten.amin.default,
}


def split_reductions(gm: GraphModule) -> None:
    """Cut the large reductions of a graph in two, in place.

    Args:
        gm: a private copy of a functional graph, whose nodes carry `val`.
    """
    for node in list(gm.graph.nodes):
        parts = _num_parts(node)
        if parts > 1:
            with gm.graph.inserting_before(node):
                result = _in_two(gm.graph, node, parts)
            node.replace_all_uses_with(result)
            gm.graph.erase_node(node)


def _num_parts(node: Node) -> int:
    """In how many parts to reduce: a divisor of the number of elements; 1 to leave the node as it is."""
    if node.target not in _SUMS and node.target not in _EXTREMES:
        return 1
    source, result = val_of(node.all_input_nodes[0]), val_of(node)
    if not isinstance(source, torch.Tensor) or obstacle(node) is not None:
        return 1
    count = math.prod(source.shape)
    if count < MIN_ELEMENTS or math.prod(result.shape) != 1:
        return 1
    row = source.shape[-1]
    if row in ROW_LENGTHS and count // row <= MAX_ROWS:
        return count // row
    return max(parts for parts in range(1, MAX_PARTS + 1) if count % parts == 0)


def _in_two(graph: Graph, node: Node, parts: int) -> Node:
    source = node.all_input_nodes[0]
    count, sizes = math.prod(sizes_of(source)), list(sizes_of(node))
    dtype: torch.dtype = val_of(node).dtype
    cut = [parts, count // parts]
    like = val_of(node)
    view = call_like(graph, node, aten.view.default, (source, cut), empty_like(val_of(source), cut))
    if node.target in _EXTREMES:
        op, of_parts = _EXTREMES[cast("OpOverload", node.target)], dtype
    else:
        op, of_parts = aten.sum.dim_IntList, held(dtype)
    first = call_like(graph, node, op, (view, [1]), empty_like(like, [parts], of_parts))
    total = call_like(graph, node, op, (first, [0]), empty_like(like, []))
    if node.target is aten.mean.default:
        total = call_like(graph, node, aten.div.Tensor, (total, count), empty_like(like, []))
    return call_like(graph, node, aten.view.default, (total, sizes), like) if sizes else total


def empty_like(val: torch.Tensor, sizes: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A fake tensor of other sizes."""
    return val.new_empty(sizes, dtype=dtype)


def call_like(graph: Graph, like: Node, op: OpOverload, args: tuple[Any, ...], val: torch.Tensor) -> Node:
    """A step of what `like` computes; kernels give it the dtype of `val`."""
    made = graph.call_function(op, args)
    made.meta = {**like.meta, "val": val}
    return made
