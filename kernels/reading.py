"""Composes expressions: an element of a node, from elements in memory."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch.fx import Node

from aotdist.kernels.index import Index, offset, unflat
from aotdist.kernels.ir import FLOAT8, NARROW, Expr, Load, Reduce, Round, held
from aotdist.kernels.polynomial import Whole
from aotdist.kernels.rule import Point, View, cast, sizes_of, strides_of, val_of
from aotdist.kernels.rules import rule_of
from aotdist.kernels.space import Space


class KernelReader:
    """Reads nodes in one kernel.

    Args:
        views: nodes that are read through.
        computed: nodes that the kernel computes by itself; all others lie in memory.
        space: what the kernel runs over.
        folds: computed nodes that add up rows of the kernel's space.
        keeps_casts: round to narrow floating point wherever the graph does, not only where a value is stored.
    """

    def __init__(
        self,
        views: Container[Node],
        computed: Container[Node],
        space: Space,
        *,
        folds: Container[Node] = (),
        keeps_casts: bool,
    ) -> None:
        self.touched: dict[tuple[Node, Point], None] = {}
        """Which nodes were read where, views apart, in order."""
        self._views = views
        self._computed = computed
        self._space = space
        self._folds = folds
        self._keeps_casts = keeps_casts
        self._known: dict[tuple[Node, Point], Expr] = {}

    def read(self, node: Node, point: Point) -> Expr:
        """An element of what `node` computes."""
        key = (node, point)
        if key not in self._known:
            self._known[key] = self._read(node, point)
        return self._known[key]

    def _read(self, node: Node, point: Point) -> Expr:
        rule = rule_of(node)
        if node in self._views:
            assert isinstance(rule, View), f"{node} is no view"
            return self.read(rule.source(node), point.to(rule.place(node, point.indices)))
        self.touched[node, point] = None
        if node in self._computed:
            assert rule is not None and not isinstance(rule, View), f"{node} is not computed by kernels"
            return self._folded(node, point) if node in self._folds else rule.value(self, node, point)
        val = val_of(node)
        guard = () if point.guard is None else (point.guard,)
        load = Load(node.name, offset(point.indices, strides_of(node)), val.dtype)
        return Expr(load, guard, held(val.dtype))

    def _folded(self, node: Node, point: Point) -> Expr:
        """The sum over the rows of a part, of the element at the kernel's current row."""
        (source,), (part, *columns) = node.all_input_nodes, point.indices
        row = self._space.row() % sizes_of(source)[1]
        value = cast(self.read(source, point.to((part, row, *columns))), val_of(node).dtype)
        return Expr(Reduce("sum", "x"), (value,), value.dtype)

    def reduced(self, sizes: Sequence[Whole]) -> tuple[Index, ...]:
        """The place along what is reduced, as indices of dimensions of `sizes`."""
        return unflat(self._space.column(), sizes)

    def rounded(self, value: Expr, dtype: torch.dtype) -> Expr:
        """`value` as it leaves an operator whose result has `dtype`; float8 is always rounded."""
        keeps = dtype in FLOAT8 or (self._keeps_casts and dtype in NARROW)
        return Expr(Round(dtype), (value,), value.dtype) if keeps else value
