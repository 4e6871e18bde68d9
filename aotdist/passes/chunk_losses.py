"""Computes losses of a linear layer's logits by chunks of rows, so that all logits are never there at once.

A loss that `linear_losses` finds becomes (N rows, D features, V classes)

    forward   linear_cross_entropy(x, w, labels) -> loss, gradients of x and w for a gradient of 1
    backward  each gradient times the incoming one

Rows are left out of x where the program leaves them out of its logits (`logits[:, :-1]`). Sums are taken in
another order than in eager, and the incoming gradient is multiplied last. A loss is left as it is if anything
else reads the logits, or the steps between them and the loss: results, hooks, collectives of a sharded
vocabulary; and where classes have weights, labels are smoothed, the layer has a bias, or every row keeps its
own loss.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from aotdist.partition.traits import value_bytes
from aotdist.passes.editing import emit, erase_unused
from aotdist.passes.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from aotdist.passes.linear_losses import SLICE, VIEWS, LinearLoss, LossGradients, linear_losses, slice_of
from aotdist.program import Graph
from aotdist.settings import Settings

_ATEN = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default

_ROWS_OF_A_TILE = 16
"""Chunks are whole tiles of a matrix product."""


def chunk_losses(graph: Graph, settings: Settings) -> Graph:
    """The same graph with losses by chunks where their logits take more than `settings.loss_chunk_bytes`."""
    most = settings.loss_chunk_bytes
    if most is None or not _large_losses(graph.gm.graph, most):
        return graph
    chunked = graph.copied()
    for loss in _large_losses(chunked.gm.graph, most):
        _rewrite(chunked.gm.graph, loss, most)
    return chunked


def _large_losses(graph: FxGraph, most: int) -> list[LinearLoss]:
    return [loss for loss in linear_losses(graph) if value_bytes(loss.product) > most]


def _rewrite(graph: FxGraph, loss: LinearLoss, most: int) -> None:
    gradients = loss.gradients
    wanted = (gradients.of_input, gradients.of_weight) if gradients else (None, None)
    replaced = [node for node in wanted if node is not None]
    with graph.inserting_before(loss.nll):
        rows = _rows(graph, loss)
        num_rows = _rows_of_a_chunk(loss, most)
        of_what = (node is not None for node in wanted)
        args = (rows, loss.weight, loss.labels, loss.ignore_index, num_rows, *of_what)
        whole = emit(graph, LINEAR_CROSS_ENTROPY, args, loss.nll)
        picks = [emit(graph, operator.getitem, (whole, at), loss.nll) for at in range(2 + len(replaced))]
        result, count, *unscaled = picks
        if loss.is_mean:
            result = emit(graph, _ATEN.div.Tensor, (result, count), loss.nll)
        result = _cast(graph, result, loss.result.meta["val"].dtype, loss.nll)
    loss.result.replace_all_uses_with(result)
    if gradients is not None:
        _scale(graph, loss, gradients, count, dict(zip(replaced, unscaled, strict=True)))
    erase_unused(graph, loss.result)


def _rows_of_a_chunk(loss: LinearLoss, most: int) -> int:
    logits = loss.product.meta["val"]
    fitting = most // (logits.size(1) * logits.element_size())
    return max(fitting // _ROWS_OF_A_TILE, 1) * _ROWS_OF_A_TILE


def _rows(graph: FxGraph, loss: LinearLoss) -> Node:
    """The rows of the layer's input that the loss is of: views and slices of logits, applied to the input."""
    rows = loss.input
    if not any(step.target is SLICE for step in loss.way):
        return rows
    num_features = rows.meta["val"].size(1)
    for step in loss.way:
        if step.target is SLICE:
            rows = emit(graph, SLICE, (rows, *step.args[1:]), step)
        elif step.target in VIEWS:
            rows = _arranged(graph, rows, [*step.meta["val"].shape[:-1], num_features], step)
    return rows


def _arranged(graph: FxGraph, node: Node, sizes: list[int], like: Node) -> Node:
    if not node.meta["val"].is_contiguous():
        options = {"memory_format": torch.contiguous_format}
        node = emit(graph, _ATEN.clone.default, (node,), like, kwargs=options)
    return emit(graph, _ATEN.view.default, (node, sizes), like)


def _scale(
    graph: FxGraph, loss: LinearLoss, gradients: LossGradients, count: Node, unscaled_of: Mapping[Node, Node]
) -> None:
    """Replace the graph's gradients by those of the sum of losses, times the incoming gradient."""
    like = gradients.first
    with graph.inserting_before(like):
        for old, unscaled in unscaled_of.items():
            # Each has a factor of its own, so that a compiler that fuses needs no kernel for one number.
            factor = _cast(graph, gradients.arriving, count.meta["val"].dtype, like)
            if loss.is_mean:
                # Where no row counts, the loss is no number, but its gradients are zeros.
                divisor = emit(graph, _ATEN.clamp_min.default, (count, 1), like)
                factor = emit(graph, _ATEN.div.Tensor, (factor, divisor), like)
            value = _cast(graph, unscaled, factor.meta["val"].dtype, old)
            new = _cast(
                graph, emit(graph, _ATEN.mul.Tensor, (value, factor), old), old.meta["val"].dtype, old
            )
            if old is gradients.of_input:
                new = _all_rows(graph, loss, new)
            old.replace_all_uses_with(new)
            erase_unused(graph, old)


def _all_rows(graph: FxGraph, loss: LinearLoss, gradient: Node) -> Node:
    """The gradient of the layer's input: that of the rows that the loss is of, and zeros for the others."""
    if gradient.meta["val"].size(0) == loss.input.meta["val"].size(0):
        return gradient
    num_features = gradient.meta["val"].size(1)
    for step in reversed(loss.way):
        before: Any = step.all_input_nodes[0].meta["val"]
        if step.target is SLICE:
            dim, start, left = slice_of(step)
            pads = [0, 0] * (before.dim() - 1 - dim) + [start, before.size(dim) - start - left]
            gradient = emit(graph, _ATEN.constant_pad_nd.default, (gradient, pads, 0.0), step)
        elif step.target in VIEWS:
            gradient = _arranged(graph, gradient, [*before.shape[:-1], num_features], step)
        gradient.meta["phase"] = "backward"
    return gradient


def _cast(graph: FxGraph, node: Node, dtype: torch.dtype, like: Node) -> Node:
    return node if node.meta["val"].dtype is dtype else emit(graph, _CAST, (node, dtype), like)
