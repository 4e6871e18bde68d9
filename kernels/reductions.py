"""Operators that reduce dimensions: sums, extremes, moments."""

from __future__ import annotations

import math
import operator
from typing import cast

import torch
from torch.fx import Node

from aotdist.kernels.index import Index
from aotdist.kernels.ir import Expr, Reduce, Reduction, held
from aotdist.kernels.polynomial import Whole, at_most
from aotdist.kernels.rule import (
    NotEmitted,
    Point,
    Reader,
    Reducing,
    constant,
    counted,
    elementwise,
    sizes_of,
    val_of,
)
from aotdist.kernels.rule import cast as converted
from aotdist.torch_seam.operators import OpOverload

aten = torch.ops.aten


def _source(node: Node) -> Node:
    return cast("Node", node.args[0])


def _dims(node: Node) -> tuple[int, ...]:
    """The dimensions that an operator reduces: its second argument, all of them if there is none."""
    dim_or_dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    num_dims = len(sizes_of(_source(node)))
    if dim_or_dims is None or dim_or_dims == []:
        return tuple(range(num_dims))
    chosen = [dim_or_dims] if isinstance(dim_or_dims, int) else cast("list[int]", dim_or_dims)
    return tuple(sorted(dim % num_dims for dim in chosen)) if num_dims else ()


def _element(reader: Reader, node: Node, point: Point) -> Expr:
    """The operand's element at the result's indices and the kernel's reduced indices."""
    source, dims = _source(node), _dims(node)
    sizes = sizes_of(source)
    along = dict(zip(dims, reader.reduced([sizes[dim] for dim in dims]), strict=True))
    own = iter(
        [index for dim, index in enumerate(point.indices) if dim not in along]
        if len(point.indices) == len(sizes)
        else point.indices
    )
    indices: list[Index] = [along[dim] if dim in along else next(own) for dim in range(len(sizes))]
    return reader.read(source, point.to(indices))


def _reduce(kind: Reduction, value: Expr, count: Whole) -> Expr:
    return value if count == 1 else Expr(Reduce(kind), (value,), value.dtype)


_OF_TRUTHS: dict[Reduction, Reduction] = {"max": "any", "min": "all"}


def _reducing(kind: Reduction) -> Reducing:
    def value(reader: Reader, node: Node, point: Point) -> Expr:
        dtype: torch.dtype = val_of(node).dtype
        element = _element(reader, node, point)
        own = _OF_TRUTHS.get(kind, kind) if dtype is torch.bool else kind
        return reader.rounded(_reduce(own, converted(element, dtype), _count(node)), dtype)

    return Reducing(value, _dims)


def _mean(reader: Reader, node: Node, point: Point) -> Expr:
    dtype: torch.dtype = val_of(node).dtype
    element = converted(_element(reader, node, point), dtype)
    return reader.rounded(_mean_of(element, _count(node)), dtype)


def _count(node: Node) -> Whole:
    return math.prod(sizes_of(_source(node))[dim] for dim in _dims(node))


def _mean_of(value: Expr, count: Whole) -> Expr:
    return elementwise("div", _reduce("sum", value, count), counted(count, value.dtype))


def _moments(reader: Reader, node: Node, point: Point) -> tuple[Expr, Expr]:
    """Variance and mean in two passes: the second subtracts the mean, which avoids cancellation."""
    dtype: torch.dtype = held(val_of(_source(node)).dtype)
    element = converted(_element(reader, node, point), dtype)
    mean = _mean_of(element, _count(node))
    off = elementwise("sub", element, mean)
    squares = _reduce("sum", elementwise("mul", off, off), _count(node))
    return elementwise("div", squares, _freedom(node, dtype)), mean


def _freedom(node: Node, dtype: torch.dtype) -> Expr:
    """What a sum of squares is divided by."""
    count, correction = _count(node), _correction(node)
    if isinstance(count, int):
        return constant(max(0.0, count - correction), dtype)
    if not correction.is_integer() or not at_most(int(correction), count):
        raise NotEmitted("a correction that may be more than there are elements")
    return counted(count - int(correction), dtype)


def _correction(node: Node) -> float:
    given = node.kwargs.get("correction")
    return 1.0 if given is None else float(cast("float", given))


def _variance(reader: Reader, node: Node, point: Point) -> Expr:
    return reader.rounded(_moments(reader, node, point)[0], val_of(node).dtype)


def _moment(reader: Reader, node: Node, point: Point) -> Expr:
    both, pick = cast("tuple[Node, int]", node.args)
    return reader.rounded(_moments(reader, both, point)[pick], val_of(node).dtype)


def _whole(node: Node) -> tuple[int, ...]:
    return _dims(_source(node))


RULES: dict[OpOverload, Reducing] = {
    aten.sum.default: _reducing("sum"),
    aten.sum.dim_IntList: _reducing("sum"),
    aten.prod.default: _reducing("prod"),
    aten.prod.dim_int: _reducing("prod"),
    aten.amax.default: _reducing("max"),
    aten.max.default: _reducing("max"),
    aten.amin.default: _reducing("min"),
    aten.min.default: _reducing("min"),
    aten.any.default: _reducing("any"),
    aten.any.dim: _reducing("any"),
    aten.any.dims: _reducing("any"),
    aten.all.default: _reducing("all"),
    aten.all.dim: _reducing("all"),
    aten.all.dims: _reducing("all"),
    aten.mean.default: Reducing(_mean, _dims),
    aten.mean.dim: Reducing(_mean, _dims),
    aten.var.correction: Reducing(_variance, _dims),
}


def reduced_dims(node: Node) -> tuple[tuple[Whole, ...], tuple[int, ...]]:
    """Sizes of the operand of a reduction, and the dimensions that are reduced."""
    own = _source(node) if node.target is operator.getitem else node
    return sizes_of(_source(own)), _dims(own)


def rule_of_part(node: Node) -> Reducing | None:
    """The rule of one of several results of a reduction, if `node` picks one."""
    source = node.args[0] if node.target is operator.getitem else None
    is_moment = isinstance(source, Node) and source.target is aten.var_mean.correction
    return Reducing(_moment, _whole) if is_moment else None
