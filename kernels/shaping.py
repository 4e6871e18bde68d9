"""Operators that move elements (join, pad, put in place, look up), and tensors of known numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch.fx import Node

from aotdist.kernels.index import Index, Lookup, number, of_atom
from aotdist.kernels.ir import Expr
from aotdist.kernels.polynomial import Whole, at_most, is_below
from aotdist.kernels.rule import (
    NotEmitted,
    Point,
    Pointwise,
    Reader,
    Rule,
    broadcast,
    constant,
    counted,
    elementwise,
    from_start,
    number_of,
    operand,
    position,
    sizes_of,
    val_of,
)
from aotdist.kernels.rule import cast as converted
from aotdist.torch_seam.operators import OpOverload

aten, prims = torch.ops.aten, torch.ops.prims


def _compared(test: str, index: Index, bound: Whole) -> Expr:
    return elementwise(test, position(index), counted(bound, torch.int64), dtype=torch.bool)


def _both(conditions: Sequence[Expr]) -> Expr | None:
    both: Expr | None = None
    for condition in conditions:
        both = condition if both is None else elementwise("and", both, condition)
    return both


def _within(index: Index, start: Whole, end: Whole) -> list[Expr]:
    """The conditions for `start <= index < end` that do not hold everywhere."""
    low, high = index.bounds
    after = [] if at_most(start, low) else [_compared("ge", index, start)]
    return after + ([] if is_below(high, end) else [_compared("lt", index, end)])


def _chosen(condition: Expr | None, value: Expr, other: Expr) -> Expr:
    return value if condition is None else elementwise("where", condition, value, other, dtype=other.dtype)


def _guarded(reader: Reader, source: Node, point: Point, condition: Expr | None, dtype: torch.dtype) -> Expr:
    return converted(reader.read(source, point if condition is None else point.where(condition)), dtype)


def _joined(reader: Reader, node: Node, point: Point) -> Expr:
    dtype: torch.dtype = val_of(node).dtype
    sources = [source for source in cast("Sequence[Node]", node.args[0]) if sizes_of(source) != (0,)]
    dim = int(cast("int", node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0))) % len(
        point.indices
    )
    ends = list(accumulate(sizes_of(source)[dim] for source in sources))
    index, value = point.indices[dim], constant(0, dtype)
    for source, end in zip(sources, ends, strict=True):
        start = end - sizes_of(source)[dim]
        condition = _both(_within(index, start, end))
        at = point.along(dim, index - start)
        if start == end:
            continue
        value = _chosen(condition, _guarded(reader, source, at, condition, dtype), value)
    return value


def _padded(reader: Reader, node: Node, point: Point) -> Expr:
    source, pads = cast("tuple[Node, list[int]]", node.args[:2])
    dtype: torch.dtype = val_of(node).dtype
    fill = constant(cast("float", node.args[2] if len(node.args) > 2 else node.kwargs.get("value", 0)), dtype)
    indices, conditions, sizes = list(point.indices), list[Expr](), sizes_of(source)
    for pair in range(len(pads) // 2):
        dim = len(sizes) - 1 - pair
        indices[dim] = indices[dim] - number_of(pads[2 * pair])
        conditions += _within(indices[dim], 0, sizes[dim])
    condition = _both(conditions)
    return _chosen(condition, _guarded(reader, source, point.to(indices), condition, dtype), fill)


def _slice_written(reader: Reader, node: Node, point: Point) -> Expr:
    whole, part, *rest = node.args
    names = ("dim", "start", "end", "step")
    options = dict(zip(names, rest, strict=False)) | dict(node.kwargs)
    dim = int(cast("int", options.get("dim", 0))) % len(point.indices)
    step = number_of(options.get("step", 1))
    size = sizes_of(node)[dim]
    start = from_start(number_of(options.get("start") or 0), size)
    end = from_start(number_of(options.get("end", size)), size)
    index = point.indices[dim]
    conditions = _within(index, start, end)
    if step != 1:
        offset_in_step = (index - start) % step
        conditions.append(_compared("eq", offset_in_step, 0))
    at = point.along(dim, (index - start) // step)
    return _put(reader, node, (cast("Node", whole), cast("Node", part)), point, at, conditions)


def _selection_written(reader: Reader, node: Node, point: Point) -> Expr:
    whole, part, dim, index = cast("tuple[Node, Node, int, int | Node]", node.args)
    dim %= len(point.indices)
    at = point.to((*point.indices[:dim], *point.indices[dim + 1 :]))
    place = from_start(number_of(index), sizes_of(node)[dim])
    conditions = [_compared("eq", point.indices[dim], place)]
    return _put(reader, node, (whole, part), point, at, conditions)


def _put(
    reader: Reader,
    node: Node,
    sources: tuple[Node, Node],
    point: Point,
    at: Point,
    conditions: Sequence[Expr],
) -> Expr:
    """The part where the conditions hold, and the whole elsewhere."""
    (whole, part), dtype, condition = sources, val_of(node).dtype, _both(conditions)
    other = converted(reader.read(whole, point), dtype)
    at = at.to(broadcast(at.indices, sizes_of(part)))
    return _chosen(condition, _guarded(reader, part, at, condition, dtype), other)


def _flipped(reader: Reader, node: Node, point: Point) -> Expr:
    sizes = sizes_of(node)
    dims = {dim % len(sizes) for dim in cast("list[int]", node.args[1])}
    indices = [
        index * -1 + (sizes[dim] - 1) if dim in dims else index for dim, index in enumerate(point.indices)
    ]
    return reader.read(cast("Node", node.args[0]), point.to(indices))


def _repeated(reader: Reader, node: Node, point: Point) -> Expr:
    sizes = sizes_of(cast("Node", node.args[0]))
    own = point.indices[len(point.indices) - len(sizes) :]
    return reader.read(
        cast("Node", node.args[0]), point.to([index % size for index, size in zip(own, sizes, strict=True)])
    )


def _full(reader: Reader, node: Node, point: Point) -> Expr:
    value = node.args[1] if len(node.args) > 1 else node.kwargs["fill_value"]
    return _filled_with(node, value)


def _scalar(reader: Reader, node: Node, point: Point) -> Expr:
    return _filled_with(node, node.args[0])


def _filled_with(node: Node, value: Any) -> Expr:
    dtype: torch.dtype = val_of(node).dtype
    return counted(number_of(value), dtype) if isinstance(value, Node) else constant(value, dtype)


def _filled(value: float) -> Pointwise:
    return Pointwise(lambda reader, node, point: _filled_with(node, value), is_cheap=True)


def _counted(reader: Reader, node: Node, point: Point) -> Expr:
    start, step = (number_of(node.kwargs.get(name)) for name in ("start", "step"))
    return converted(position(point.indices[0] * step + start), val_of(node).dtype)


def _looked_up(reader: Reader, index: Node, point: Point, size: Whole, *, wraps: bool) -> Index:
    """The index that a tensor of indices holds; a negative one counts from the end of `size`."""
    dtype: torch.dtype = val_of(index).dtype
    if dtype not in (torch.int32, torch.int64):
        raise NotEmitted(f"indices of {dtype}")
    value = operand(reader, index, point, dtype)
    if wraps:
        is_negative = elementwise("lt", value, constant(0, dtype), dtype=torch.bool)
        from_end = elementwise("add", value, counted(size, dtype))
        value = elementwise("where", is_negative, from_end, value, dtype=dtype)
    return of_atom(Lookup(value, size))


def _embedded(reader: Reader, node: Node, point: Point) -> Expr:
    table, index = cast("tuple[Node, Node]", node.args[:2])
    row = _looked_up(reader, index, point.to(point.indices[:-1]), sizes_of(table)[0], wraps=False)
    return reader.read(table, point.to((row, point.indices[-1])))


def _gathered(reader: Reader, node: Node, point: Point) -> Expr:
    """Each element by an index of its own."""
    return _found_along(reader, node, point, lambda dim: point)


def _picked(reader: Reader, node: Node, point: Point) -> Expr:
    """Whole slices, each by one index."""
    return _found_along(reader, node, point, lambda dim: point.to((point.indices[dim],)))


def _found_along(reader: Reader, node: Node, point: Point, index_point: Callable[[int], Point]) -> Expr:
    source, dim, index = cast("tuple[Node, int, Node]", node.args[:3])
    sizes = sizes_of(source)
    if not sizes:
        raise NotEmitted("a tensor without dimensions")
    dim %= len(sizes)
    place = _looked_up(reader, index, index_point(dim), sizes[dim], wraps=False)
    return reader.read(source, point.along(dim, place))


def _indexed(reader: Reader, node: Node, point: Point) -> Expr:
    """`source[indices]`: adjacent indexed dimensions stay in place, others come first, as in NumPy."""
    source, index_nodes = cast("tuple[Node, list[Node | None]]", node.args)
    sizes = sizes_of(source)
    indexed = [dim for dim, index in enumerate(index_nodes) if index is not None]
    neighbours = indexed == list(range(indexed[0], indexed[-1] + 1))
    count = len(sizes_of(node)) - (len(sizes) - len(indexed))  # dimensions that the indices have together
    first = indexed[0] if neighbours else 0
    at = point.to(point.indices[first : first + count])
    rest = iter((*point.indices[:first], *point.indices[first + count :]))
    places = [
        _looked_up(reader, index_nodes[dim], at, size, wraps=True)  # type: ignore[arg-type]
        if dim in indexed
        else next(rest)
        for dim, size in enumerate(sizes)
    ]
    return reader.read(source, point.to(places))


def _scattered(reader: Reader, node: Node, point: Point) -> Expr:
    """A number scattered to one place of each row: every place compares its index with that one."""
    source, dim, index, value = cast("tuple[Node, int, Node, float]", node.args[:4])
    sizes, dtype = sizes_of(source), val_of(node).dtype
    if isinstance(value, Node) or len(node.args) > 4 or node.kwargs:
        raise NotEmitted("a reduction, or a number that differs from call to call")
    if not sizes or sizes_of(index) != (*sizes[: dim % len(sizes)], 1, *sizes[dim % len(sizes) + 1 :]):
        raise NotEmitted("several places in a row")
    dim %= len(sizes)
    place = reader.read(index, point.along(dim, number(0)))
    own = converted(position(point.indices[dim]), val_of(index).dtype)
    is_here = elementwise("eq", own, place, dtype=torch.bool)
    return _chosen(is_here, constant(value, dtype), reader.read(source, point))


RULES: dict[OpOverload, Rule] = {
    aten.cat.default: Pointwise(_joined),
    aten.constant_pad_nd.default: Pointwise(_padded),
    aten.slice_scatter.default: Pointwise(_slice_written),
    aten.select_scatter.default: Pointwise(_selection_written),
    aten.flip.default: Pointwise(_flipped),
    prims.rev.default: Pointwise(_flipped),
    aten.repeat.default: Pointwise(_repeated),
    aten.full.default: Pointwise(_full, is_cheap=True),
    aten.full_like.default: Pointwise(_full, is_cheap=True),
    aten.scalar_tensor.default: Pointwise(_scalar, is_cheap=True),
    aten.zeros.default: _filled(0),
    aten.zeros_like.default: _filled(0),
    aten.ones.default: _filled(1),
    aten.ones_like.default: _filled(1),
    prims.iota.default: Pointwise(_counted, is_cheap=True),
    aten.embedding.default: Pointwise(_embedded),
    aten.gather.default: Pointwise(_gathered),
    aten.scatter.value: Pointwise(_scattered),
    aten.index_select.default: Pointwise(_picked),
    aten.index.Tensor: Pointwise(_indexed),
}
