"""Cuts reductions to one result in two: otherwise one block reads everything, and the rest of a GPU is idle.

`x.sum()` of a million elements becomes 1,024 sums of 1,024, each by a block of its own, and the sum of those.
The first stage computes what is summed, as before. Partial sums of narrow floating point are kept in float32.
The order of the additions is fixed by the sizes, so results do not differ from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch.fx import Node

from aotdist.kernels.ir import held
from aotdist.kernels.polynomial import names_in
from aotdist.kernels.rule import sizes_of, val_of
from aotdist.kernels.rules import obstacle
from aotdist.kernels.symbols import arguments_for, whole
from aotdist.kernels.uses import num_elements
from aotdist.program import Graph
from aotdist.torch_seam.nodes import spell_number
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.symbols import hint

aten = torch.ops.aten

MIN_ELEMENTS = 2**15
"""The fewest elements of a reduction that is cut: one block reduces so many in about the time of a launch."""
MAX_PARTS = 1024
ROW_LENGTHS = range(512, 8193)
"""Lengths of rows that may be the parts, if there are no more than `MAX_ROWS`: then a kernel that computes
rows, like a norm before the largest element of all, can compute the first stage too."""
MAX_ROWS = 8192

_SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default}
_EXTREMES = {
    aten.amax.default: aten.amax.default,
    aten.amin.default: aten.amin.default,
    aten.max.default: aten.amax.default,
    aten.min.default: aten.amin.default,
}


def split_reductions(graph: Graph) -> None:
    """Cut the large reductions of a graph in two, in place.

    Args:
        graph: a private copy, functional.

    Raises:
        NotProved: a part is made of a symbol that no argument of the graph is.
    """
    nodes, sizes = graph.gm.graph, graph.named_sizes()
    for node in list(graph.gm.graph.nodes):
        cut = _cut(node)
        if cut is not None:
            with nodes.inserting_before(node):
                result = _in_two(nodes, node, cut, sizes)
            node.replace_all_uses_with(result)
            nodes.erase_node(node)


def _cut(node: Node) -> list[Any] | None:
    """Number and size of the parts to reduce first; None to leave the node as it is."""
    if node.target not in _SUMS and node.target not in _EXTREMES:
        return None
    source_of = node.all_input_nodes[0]
    source = val_of(source_of)
    if not isinstance(source, torch.Tensor) or obstacle(node) is not None:
        return None
    if num_elements(source_of) < MIN_ELEMENTS or math.prod(sizes_of(node)) != 1:
        return None
    sizes: Sequence[Any] = source.shape
    *rows, row = sizes
    count: Any = math.prod(sizes)
    of_rows = math.prod(rows)
    if hint(row) in ROW_LENGTHS and hint(of_rows) <= MAX_ROWS:
        return [of_rows, row] if hint(of_rows) > 1 else None
    if isinstance(count, int):
        parts = max(parts for parts in range(1, MAX_PARTS + 1) if count % parts == 0)
        return [parts, count // parts] if parts > 1 else None
    return _along_dimensions(sizes)


def _along_dimensions(sizes: Sequence[Any]) -> list[Any] | None:
    """The most parts that whole dimensions make, as divisors of symbolic sizes are not known."""
    cuts = [[math.prod(sizes[:at]), math.prod(sizes[at:])] for at in range(1, len(sizes))]
    few = [cut for cut in cuts if 1 < hint(cut[0]) <= MAX_ROWS]
    return max(few, key=lambda cut: hint(cut[0]), default=None)


def _in_two(graph: fx.Graph, node: Node, cut: list[Any], symbols: Mapping[str, Node]) -> Node:
    source = node.all_input_nodes[0]
    (parts, _), count, sizes = cut, math.prod(cut), list(val_of(node).shape)
    dtype: torch.dtype = val_of(node).dtype
    like = val_of(node)
    spelled = [_spelled(graph, number, symbols) for number in (*cut, count)]
    view = call_like(graph, node, aten.view.default, (source, spelled[:2]), empty_like(val_of(source), cut))
    if node.target in _EXTREMES:
        op, of_parts = _EXTREMES[cast("OpOverload", node.target)], dtype
    else:
        op, of_parts = aten.sum.dim_IntList, held(dtype)
    first = call_like(graph, node, op, (view, [1]), empty_like(like, [parts], of_parts))
    total = call_like(graph, node, op, (first, [0]), empty_like(like, []))
    if node.target is aten.mean.default:
        total = call_like(graph, node, aten.div.Tensor, (total, spelled[2]), empty_like(like, []))
    return call_like(graph, node, aten.view.default, (total, sizes), like) if sizes else total


def _spelled(graph: fx.Graph, number: Any, symbols: Mapping[str, Node]) -> Any:
    """A number as an argument of a node."""
    if isinstance(number, int):
        return number
    arguments_for(sorted(names_in([whole(number)])), symbols)
    return spell_number(number, symbols, graph)


def empty_like(val: torch.Tensor, sizes: Sequence[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A fake tensor of other sizes."""
    return val.new_empty(sizes, dtype=dtype)


def call_like(graph: fx.Graph, like: Node, op: OpOverload, args: tuple[Any, ...], val: torch.Tensor) -> Node:
    """A new node with the metadata of `like`; kernels compute it in the dtype of `val`."""
    made = graph.call_function(op, args)
    made.meta = {**like.meta, "val": val}
    return made
