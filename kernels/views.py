"""Views: an element of one is an element of what it views, so they are maps of indices and never kernels."""

from __future__ import annotations

import operator
from itertools import accumulate
from typing import Any, cast

import torch
from torch.fx import Node

from aotdist.kernels.index import Index, flat, number, unflat
from aotdist.kernels.rule import View, broadcast, from_start, number_of, sizes_of, val_of
from aotdist.kernels.symbols import natural
from aotdist.torch_seam.operators import OpOverload

aten = torch.ops.aten
Indices = tuple[Index, ...]


def _viewed(node: Node) -> Node:
    return cast("Node", node.args[0])


def _argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _same(node: Node, indices: Indices) -> Indices:
    return indices


def _reshaped(node: Node, indices: Indices) -> Indices:
    return unflat(flat(indices, sizes_of(node)), sizes_of(_viewed(node)))


def _expanded(node: Node, indices: Indices) -> Indices:
    return broadcast(indices, sizes_of(_viewed(node)))


def _permuted(node: Node, indices: Indices) -> Indices:
    return _reordered(indices, [dim % len(indices) for dim in cast("list[int]", node.args[1])])


def _transposed(node: Node, indices: Indices) -> Indices:
    order = list(range(len(indices)))
    if len(order) < 2:
        return indices
    one, other = (0, 1) if len(node.args) == 1 else cast("tuple[int, int]", node.args[1:])
    order[one], order[other] = order[other], order[one]
    return _reordered(indices, order)


def _reordered(indices: Indices, order: list[int]) -> Indices:
    """Dimension `k` of the view is dimension `order[k]` of what it views."""
    return tuple(indices[order.index(dim)] for dim in range(len(order)))


def _selected(node: Node, indices: Indices) -> Indices:
    sizes = sizes_of(_viewed(node))
    dim = cast("int", node.args[1]) % len(sizes)
    return (*indices[:dim], number(from_start(number_of(node.args[2]), sizes[dim])), *indices[dim:])


def _sliced(node: Node, indices: Indices) -> Indices:
    sizes = sizes_of(_viewed(node))
    dim = _argument(node, 1, "dim", 0) % len(sizes)
    start = from_start(number_of(_argument(node, 2, "start") or 0), sizes[dim])
    step = number_of(_argument(node, 4, "step", 1))
    return (*indices[:dim], indices[dim] * step + start, *indices[dim + 1 :])


def _part(node: Node, indices: Indices) -> Indices:
    split, pick = cast("tuple[Node, int]", node.args)
    dim = _argument(split, 2, "dim", 0) % len(indices)
    starts = [0, *accumulate(natural(part.shape[dim]) for part in val_of(split))]
    return (*indices[:dim], indices[dim] + starts[pick % len(val_of(split))], *indices[dim + 1 :])


def _unbound(node: Node, indices: Indices) -> Indices:
    split, pick = cast("tuple[Node, int]", node.args)
    dim = _argument(split, 1, "dim", 0) % len(sizes_of(_viewed(split)))
    return (*indices[:dim], number(pick % len(val_of(split))), *indices[dim:])


RULES: dict[OpOverload, View] = {
    **{op: View(_reshaped) for op in (
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
        aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    )},
    **{op: View(_same) for op in (aten.alias.default, aten.detach.default)},
    aten.expand.default: View(_expanded),
    aten.permute.default: View(_permuted),
    aten.transpose.int: View(_transposed),
    aten.t.default: View(_transposed),
    aten.select.int: View(_selected),
    aten.slice.Tensor: View(_sliced),
}  # fmt: skip

_PARTS: dict[OpOverload, View] = {
    **{op: View(_part) for op in (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)},
    aten.unbind.int: View(_unbound),
}


def rule_of_part(node: Node) -> View | None:
    """The rule of a pick from a tensor that was split, if `node` is one."""
    source = node.args[0] if node.target is operator.getitem else None
    return _PARTS.get(cast("OpOverload", source.target)) if isinstance(source, Node) else None
