"""Cuts sums of columns in two, where a kernel that reduces rows can compute the first half: norms' backward.

The gradient of a norm's input takes a sum over each row, that of its weight one over all rows. Two kernels
would read everything twice. Instead, the rows are cut in parts; the block that goes through the rows of a
part adds them up on the way (it *folds* them), and a second kernel sums the few partial results. No two
blocks write the same place, and the order of additions is fixed by the sizes.

Sums are cut before fusion; a cut that no kernel takes is undone, except for sums to few results, see
`aotdist.kernels.few_results`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from aotdist.kernels.ir import held
from aotdist.kernels.launching import MAX_PERSISTENT
from aotdist.kernels.polynomial import Whole, at_most
from aotdist.kernels.reductions import reduced_dims
from aotdist.kernels.rule import sizes_of, val_of
from aotdist.kernels.rules import is_reducing, obstacle
from aotdist.kernels.splitting import call_like, empty_like
from aotdist.torch_seam.operators import OpOverload

aten = torch.ops.aten

MIN_PARTS = 64
MAX_PARTS = 256
"""About two for each multiprocessor: all of them run at the same time."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A sum of columns in two halves.

    Args:
        nodes: the halves, and views before and behind them.
        op: the operator of the original sum.
        args: its arguments.
        kwargs: its keyword arguments.
    """

    nodes: tuple[Node, ...]
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def first(self) -> Node:
        """The sums of the rows of each part."""
        return self.nodes[1]

    def take_back(self, graph: Graph) -> None:
        """Put the original sum into the graph again."""
        total = self.nodes[-1]
        with graph.inserting_before(total):
            node = graph.call_function(self.op, self.args, self.kwargs)
        node.meta = dict(total.meta)
        total.replace_all_uses_with(node)
        for gone in reversed(self.nodes):
            graph.erase_node(gone)


def rows_folded(node: Node) -> Whole:
    """How many rows each partial sum adds up, if a row kernel may fold this column sum; else 0."""
    if node.target is not aten.sum.dim_IntList:
        return 0
    sizes, dims = reduced_dims(node)
    if dims != (1,) or len(sizes) < 3:
        return 0
    parts, rows = sizes[:2]
    return rows if at_most(MIN_PARTS, parts) and at_most(parts, MAX_PARTS) else 0


def cut_columns(graph: Graph) -> list[Cut]:
    """Cut column sums in two, in place, where the graph also reduces the rows of a matrix of that size.

    Args:
        graph: of a private copy, functional; nodes carry `val`.
    """
    rows = rows_reduced(graph)
    return [cut for node in list(graph.nodes) if (cut := _cut(graph, node, rows)) is not None]


def rows_reduced(graph: Graph) -> set[tuple[Whole, Whole] | None]:
    """Number and length of the rows that a graph reduces; a kernel of these may also sum columns."""
    return {_rows(node) for node in graph.nodes if is_reducing(node)}


def _rows(node: Node) -> tuple[Whole, Whole] | None:
    """How many rows a node reduces, and how long they are; None if it reduces other dimensions."""
    sizes, dims = reduced_dims(node)
    num_kept = len(sizes) - len(dims)
    is_last = dims == tuple(range(num_kept, len(sizes)))
    return (math.prod(sizes[:num_kept]), math.prod(sizes[num_kept:])) if is_last else None


def _cut(graph: Graph, node: Node, rows: Collection[tuple[Whole, Whole] | None]) -> Cut | None:
    if node.target is not aten.sum.dim_IntList or obstacle(node) is not None:
        return None
    all_sizes, dims = reduced_dims(node)
    sizes = [size for size in all_sizes if isinstance(size, int)]
    if len(sizes) < len(all_sizes):
        return None  # their divisors differ from call to call
    count, columns = math.prod(sizes[: len(dims)]), sizes[len(dims) :]
    if dims != tuple(range(len(dims))) or not columns or (count, math.prod(columns)) not in rows:
        return None
    parts = max(parts for parts in range(1, MAX_PARTS + 1) if count % parts == 0)
    if parts < MIN_PARTS or parts == count or math.prod(columns) > MAX_PERSISTENT:
        return None
    op, args, kwargs = cast("OpOverload", node.target), node.args, dict(node.kwargs)
    with graph.inserting_before(node):
        nodes = _halves(graph, node, [parts, count // parts, *columns])
    node.replace_all_uses_with(nodes[-1])
    graph.erase_node(node)
    return Cut(nodes, op, args, kwargs)


def _halves(graph: Graph, node: Node, sizes: Sequence[int]) -> tuple[Node, ...]:
    source, result = node.all_input_nodes[0], val_of(node)
    parts, columns = sizes[0], sizes[2:]
    view = call_like(graph, node, aten.view.default, (source, list(sizes)), empty_like(val_of(source), sizes))
    partial = empty_like(result, [parts, *columns], held(result.dtype))
    first = call_like(graph, node, aten.sum.dim_IntList, (view, [1]), partial)
    total = call_like(graph, node, aten.sum.dim_IntList, (first, [0]), empty_like(result, columns))
    own = sizes_of(node)
    if own == tuple(columns):
        return view, first, total
    return view, first, total, call_like(graph, node, aten.view.default, (total, list(own)), result)
