"""What an operator means to the emitter: how an element of its result follows from its operands'."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch.fx import Node

from aotdist.kernels.index import Index, number
from aotdist.kernels.ir import Constant, Expr, Position, held
from aotdist.kernels.polynomial import Whole, at_most, is_below
from aotdist.kernels.symbols import natural, whole
from aotdist.torch_seam.symbols import SYMBOLIC, quotient_of


class NotEmitted(Exception):
    """Why an operator is left to its library; shown by `explain`."""


@dataclass(frozen=True, slots=True)
class Point:
    """Which element of a tensor, as a function of the place in an iteration space.

    Args:
        indices: one for each dimension.
        guard: where the element exists; elsewhere its value does not matter. None for everywhere.
    """

    indices: tuple[Index, ...]
    guard: Expr | None = None

    def to(self, indices: Sequence[Index]) -> Point:
        """Another element, under the same guard."""
        return Point(tuple(indices), self.guard)

    def along(self, dim: int, index: Index) -> Point:
        """Another element along one dimension."""
        return self.to((*self.indices[:dim], index, *self.indices[dim + 1 :]))

    def where(self, condition: Expr) -> Point:
        """The same element, where a condition holds too."""
        return Point(
            self.indices, condition if self.guard is None else elementwise("and", self.guard, condition)
        )


class Reader(Protocol):
    """Reads values while a kernel is put together."""

    def read(self, node: Node, point: Point) -> Expr:
        """An element of what `node` computes."""
        ...

    def reduced(self, sizes: Sequence[Whole]) -> tuple[Index, ...]:
        """The place along the kernel's reduced variables, as indices of dimensions of `sizes`."""
        ...

    def rounded(self, value: Expr, dtype: torch.dtype) -> Expr:
        """`value` as it leaves an operator whose result has `dtype`."""
        ...


@dataclass(frozen=True, slots=True)
class View:
    """An operator that computes nothing: its elements are those of its first argument.

    Args:
        place: from an element's indices in the view to its indices in what is viewed.
    """

    place: Callable[[Node, tuple[Index, ...]], tuple[Index, ...]]

    def source(self, node: Node) -> Node:
        """What is viewed."""
        source = node.args[0]
        if isinstance(source, Node) and not isinstance(val_of(source), torch.Tensor):
            source = source.args[0]  # a pick from what was split
        assert isinstance(source, Node), f"{node} views no node"
        return source


@dataclass(frozen=True, slots=True)
class Pointwise:
    """An operator whose elements follow each from some elements of its operands.

    Args:
        value: an element.
        is_cheap: whether it is less work to compute it twice than to write it and read it back.
    """

    value: Callable[[Reader, Node, Point], Expr]
    is_cheap: bool = False


@dataclass(frozen=True, slots=True)
class Reducing:
    """An operator each of whose elements follows from a whole slice of its operand.

    Args:
        value: an element.
        dims: the dimensions of the operand that are reduced.
    """

    value: Callable[[Reader, Node, Point], Expr]
    dims: Callable[[Node], tuple[int, ...]]


Rule: TypeAlias = View | Pointwise | Reducing


def val_of(node: Node) -> Any:
    """What the trace saw in place of a node's result."""
    return node.meta["val"]


def sizes_of(node: Node) -> tuple[Whole, ...]:
    """The sizes of a node's result."""
    return tuple(map(natural, val_of(node).shape))


def strides_of(node: Node) -> tuple[Whole, ...]:
    """How many elements of a node's result lie between neighbours along each dimension."""
    return tuple(map(natural, val_of(node).stride()))


def number_of(argument: Any) -> Whole:
    """A whole number among the arguments of an operator, which may differ from call to call.

    Raises:
        NotEmitted: it is none.
    """
    value = val_of(argument) if isinstance(argument, Node) else argument
    if not isinstance(value, (int, torch.SymInt)):
        raise NotEmitted("a number that differs from call to call")
    return whole(value)


def from_start(place: Whole, size: Whole) -> Whole:
    """A place along a dimension of `size`, counted from its start; `sys.maxsize` is its end.

    Raises:
        NotEmitted: whether it is negative, and so counts from the end, differs from call to call.
    """
    if place == sys.maxsize:
        return size
    if at_most(0, place):
        return place
    if is_below(place, 0) and at_most(0, place + size):
        return place + size
    if isinstance(place, int) and isinstance(size, int):
        return 0
    raise NotEmitted("a place that differs from call to call")


def elementwise(op: str, *args: Expr, dtype: torch.dtype | None = None) -> Expr:
    """What `op` makes of each element; of the dtype of its first argument unless another is named."""
    return Expr(op, args, args[0].dtype if dtype is None else dtype)


def constant(value: float | int | bool, dtype: torch.dtype) -> Expr:
    """A number in a register for values of `dtype`."""
    dtype = held(dtype)
    if dtype.is_floating_point:
        value = float(value)
    elif dtype is torch.bool:
        value = bool(value)
    else:
        value = int(value)
    return Expr(Constant(value), (), dtype)


def position(index: Index) -> Expr:
    """An index as a value."""
    return Expr(Position(index), (), torch.int64)


def counted(count: Whole, dtype: torch.dtype) -> Expr:
    """A whole number, known or not, in a register for values of `dtype`."""
    return constant(count, dtype) if isinstance(count, int) else cast(position(number(count)), dtype)


def cast(value: Expr, dtype: torch.dtype) -> Expr:
    """`value` in a register for values of `dtype`; rounding to a narrow dtype is not done here."""
    dtype = held(dtype)
    if value.dtype is dtype:
        return value
    if isinstance(value.op, Constant):
        return constant(value.op.value, dtype)
    return elementwise("cast", value, dtype=dtype)


def broadcast(indices: Sequence[Index], sizes: Sequence[Whole]) -> tuple[Index, ...]:
    """The indices of an operand of `sizes` for an element of a result that it is broadcast to."""
    own = indices[len(indices) - len(sizes) :]
    return tuple(number(0) if size == 1 else index for index, size in zip(own, sizes, strict=True))


def _quotient(number: torch.SymFloat, dtype: torch.dtype) -> Expr:
    """The quotient of sizes, as Python divides: in 64 bits."""
    parts = quotient_of(number)
    if parts is None:
        raise NotEmitted("a number that differs from call to call")
    wide = torch.float64
    left, right = (
        constant(part, wide) if isinstance(part, float) else counted(whole(part), wide) for part in parts
    )
    return cast(elementwise("div", left, right), dtype)


def operand(reader: Reader, argument: Any, point: Point, dtype: torch.dtype) -> Expr:
    """An operand of an elementwise operator: a node, broadcast, or a number.

    Raises:
        NotEmitted: it is a number that differs from call to call, and neither a size nor made of one by `/`.
    """
    val = val_of(argument) if isinstance(argument, Node) else argument
    if isinstance(val, torch.SymFloat):
        return _quotient(val, dtype)
    if isinstance(val, SYMBOLIC):
        return counted(number_of(val), dtype)
    if not isinstance(argument, Node):
        return constant(argument, dtype)
    return cast(reader.read(argument, point.to(broadcast(point.indices, sizes_of(argument)))), dtype)
