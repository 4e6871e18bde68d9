"""Cuts reductions to few results in two: otherwise few blocks read everything, and the rest of a GPU is idle.

The statistics of a batch norm over 64 channels are 64 results, 4 blocks of neighbouring columns, for the 132
multiprocessors of an H100. Some of the dimensions that are reduced are kept at first, whole or in parts, so
that there is a block for each multiprocessor and more; what is left of them is little. Means and variances of
parts of one size make those of the whole. The order of the additions is fixed by the sizes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from aotdist.kernels.columns import Cut, rows_reduced
from aotdist.kernels.gpus import Gpu
from aotdist.kernels.ir import held
from aotdist.kernels.launching import MIN_COLUMNS
from aotdist.kernels.reductions import reduced_dims
from aotdist.kernels.rule import sizes_of, val_of
from aotdist.kernels.rules import obstacle
from aotdist.kernels.splitting import call_like, empty_like
from aotdist.torch_seam.symbols import hint

aten = torch.ops.aten

MIN_ELEMENTS = 2**18
"""How many elements are reduced, at least: fewer take about as long as another launch."""
MIN_REDUCED = 32
"""How many elements are reduced at first, at least."""
MAX_PARTS = 1024
_BLOCKS = 2  # for each multiprocessor

_SUM, _MEAN, _MOMENTS = aten.sum.dim_IntList, aten.mean.dim, aten.var_mean.correction


@dataclass(frozen=True, slots=True)
class _Cut:
    """How the operand of a reduction is viewed, and which dimensions are reduced first and last.

    Args:
        sizes: of the operand, one of its dimensions in two where that is cut.
        order: its dimensions: those that are reduced last, those of the result, those that are reduced first;
            so neighbours among results are neighbours in memory, if they are in the operand.
        num_left: how many the others are.
        num_kept: how many of these are reduced last.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    num_left: int
    num_kept: int

    @property
    def left(self) -> list[int]:
        """Sizes of what the first half leaves."""
        return [self.sizes[dim] for dim in self.order[: self.num_left]]

    @property
    def final(self) -> list[int]:
        """Sizes of what the second half leaves."""
        return self.left[self.num_kept :]

    @property
    def first(self) -> list[int]:
        """The dimensions that are reduced first, in that order."""
        return list(range(self.num_left, len(self.order)))

    @property
    def last(self) -> list[int]:
        """The dimensions that are then reduced of what that leaves."""
        return list(range(self.num_kept))


def cut_few_results(graph: fx.Graph, gpu: Gpu) -> None:
    """Cut the reductions of a graph that have few results for what they read, in place.

    Args:
        graph: of a private copy, functional; nodes carry `val`.
        gpu: what it is to keep busy.
    """
    rows = rows_reduced(graph)
    for node in list(graph.nodes):
        cut = _cut(node, rows, gpu.num_processors)
        if cut is not None:
            with graph.inserting_before(node):
                _in_two(graph, node, cut)
            graph.erase_node(node)


def is_better_cut(cut: Cut, gpu: Gpu) -> bool:
    """Whether the halves of a sum of columns keep more of a GPU busy than the whole would.

    Args:
        cut: the sum, which no kernel makes on its way.
        gpu: what it is to keep busy.
    """
    view, _, total, *_ = cut.nodes
    is_large = math.prod(sizes_of(view)) >= MIN_ELEMENTS  # type: ignore[operator]
    return is_large and math.prod(sizes_of(total)) < MIN_COLUMNS * gpu.num_processors  # type: ignore[operator]


def _cut(node: Node, rows: Collection[Any], num_processors: int) -> _Cut | None:
    """How to cut a node; None to leave it as it is."""
    if node.target not in (_SUM, _MEAN, _MOMENTS) or any(obstacle(each) for each in _picks(node)):
        return None
    source, (sizes, dims) = val_of(node.all_input_nodes[0]), reduced_dims(node)
    if not all(isinstance(size, int) for size in sizes) or not _is_sum_of_parts(node, dims):
        return None
    whole = [int(size) for size in sizes]  # type: ignore[arg-type]
    reduced = math.prod(whole[dim] for dim in dims)
    results = math.prod(whole) // max(1, reduced)
    columns = [size for dim, size in enumerate(whole) if dim not in dims]
    if results == 1 or math.prod(whole) < MIN_ELEMENTS or (reduced, math.prod(columns)) in rows:
        return None
    strides = [hint(stride) for stride in source.stride()]
    blocks = _num_blocks(whole, strides, dims, results)
    wanted = min(-(-_BLOCKS * num_processors // blocks), MAX_PARTS, reduced // MIN_REDUCED)
    if blocks > num_processors or wanted < 2:
        return None
    return _in_parts(whole, dims, strides, wanted)


def _picks(node: Node) -> list[Node]:
    """The nodes whose rules say whether a reduction is emitted."""
    return list(node.users) if node.target is _MOMENTS else [node]


def _is_sum_of_parts(node: Node, dims: Sequence[int]) -> bool:
    """Whether two stages give the result of one: moments must not be rounded in between."""
    source, picks = val_of(node.all_input_nodes[0]), [val_of(pick) for pick in _picks(node)]
    if not dims or not source.is_floating_point() or not all(pick.is_contiguous() for pick in picks):
        return False
    return node.target is not _MOMENTS or all(pick.dtype == held(source.dtype) for pick in picks)


def _num_blocks(sizes: Sequence[int], strides: Sequence[int], dims: Sequence[int], results: int) -> int:
    """How many blocks would reduce it: one per result, or per group of contiguous results."""
    nearest = min((dim for dim, size in enumerate(sizes) if size > 1), key=strides.__getitem__)
    return results if nearest in dims else -(-results // MIN_COLUMNS)


def _in_parts(sizes: list[int], dims: Sequence[int], strides: list[int], wanted: int) -> _Cut | None:
    """Keep dimensions at first, the outermost in memory before others, until there are as many parts."""
    kept, parts = list[int](), 1
    for dim in sorted(dims, key=lambda dim: -strides[dim]):
        needed = -(-wanted // parts)
        size = next((part for part in range(needed, sizes[dim]) if sizes[dim] % part == 0), sizes[dim])
        if size < sizes[dim]:
            inner = sizes[dim] // size
            sizes[dim : dim + 1], strides[dim : dim + 1] = [size, inner], [strides[dim] * inner, strides[dim]]
            kept, dims = [k + (k > dim) for k in kept], [*(d + (d > dim) for d in dims), dim + 1]
        parts *= size
        kept.append(dim)
        if parts >= wanted:
            break
    first = sorted(set(dims) - set(kept))
    if not first:
        return None
    result = [dim for dim in range(len(sizes)) if dim not in first and dim not in kept]
    return _Cut(tuple(sizes), (*kept, *result, *first), len(kept) + len(result), len(kept))


def _in_two(graph: fx.Graph, node: Node, cut: _Cut) -> None:
    source = node.all_input_nodes[0]
    if tuple(sizes_of(source)) != cut.sizes:
        viewed = val_of(source).unflatten(*_where_cut(sizes_of(source), cut.sizes))
        source = call_like(graph, node, aten.view.default, (source, list(cut.sizes)), viewed)
    ordered = val_of(source).permute(cut.order)
    source = call_like(graph, node, aten.permute.default, (source, list(cut.order)), ordered)
    if node.target is _MOMENTS:
        for pick in list(node.users):
            with graph.inserting_before(pick):
                result = _moments(graph, pick, source, cut)[int(pick.args[1])]  # type: ignore[arg-type]
                pick.replace_all_uses_with(_in_shape(graph, pick, result))
            graph.erase_node(pick)
        return
    total = _summed_up(graph, node, source, cut)
    if node.target is _MEAN:
        count = math.prod(cut.sizes) // math.prod(cut.final)
        total = call_like(graph, node, aten.div.Tensor, (total, count), val_of(total))
    node.replace_all_uses_with(_in_shape(graph, node, total))


def _where_cut(sizes: Sequence[Any], cut: Sequence[int]) -> tuple[int, tuple[int, int]]:
    """The dimension that is cut in two, and into what."""
    dim = next(dim for dim, size in enumerate(sizes) if cut[dim] != size)
    return dim, (cut[dim], cut[dim + 1])


def _summed_up(graph: fx.Graph, node: Node, source: Node, cut: _Cut) -> Node:
    like = val_of(node)
    partial = empty_like(like, cut.left, held(like.dtype))
    first = call_like(graph, node, _SUM, (source, cut.first), partial)
    return call_like(graph, node, _SUM, (first, cut.last), empty_like(like, cut.final))


def _moments(graph: fx.Graph, pick: Node, source: Node, cut: _Cut) -> tuple[Node, Node]:
    """Variance and mean: that of the parts' means is added to the mean of the parts' variances."""
    both: Any = pick.args[0]
    like, correction_or_none = val_of(pick), both.kwargs.get("correction")
    count = math.prod(cut.sizes) // math.prod(cut.final)
    correction = 1.0 if correction_or_none is None else float(correction_or_none)

    def moments(of: Node, dims: Sequence[int], sizes: Sequence[int]) -> list[Node]:
        vals = [empty_like(like, sizes), empty_like(like, sizes)]
        pair = call_like(graph, pick, _MOMENTS, (of, list(dims)), vals[0])
        pair.update_kwarg("correction", 0)
        pair.meta["val"] = tuple(vals)
        return [call_like(graph, pick, operator.getitem, (pair, at), vals[at]) for at in range(2)]  # type: ignore[arg-type]

    inner, means = moments(source, cut.first, cut.left)
    outer, mean = moments(means, cut.last, cut.final)
    within = call_like(graph, pick, _MEAN, (inner, cut.last), empty_like(like, cut.final))
    variance = call_like(graph, pick, aten.add.Tensor, (within, outer), empty_like(like, cut.final))
    scaled = (variance, count / max(1e-30, count - correction))
    return call_like(graph, pick, aten.mul.Tensor, scaled, empty_like(like, cut.final)), mean


def _in_shape(graph: fx.Graph, node: Node, result: Node) -> Node:
    """`result` with the dimensions that the node keeps."""
    sizes = list(sizes_of(node))
    if sizes == list(sizes_of(result)):
        return result
    return call_like(graph, node, aten.view.default, (result, sizes), val_of(node))
