"""How Triton spells reductions: of a block at once, or in accumulators (*lanes*) that a loop updates.

A loop accumulates for each place of its block separately, in one or two numbers: its lanes. They are combined
once, after the loop.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from aotdist.kernels.ir import Expr, Kernel, Reduce, Reduction, every_part
from aotdist.kernels.polynomial import Whole
from aotdist.kernels.rule import constant, counted, elementwise
from aotdist.kernels.spelling import TYPES

_ONLINE = {"exponentials": 'float("-inf")', "deviations": "0"}
"""Initial values of the second lane: of the maximum so far, and of the mean so far."""


def kind_of(expr: Expr) -> Reduction:
    """How a reduction combines values."""
    assert isinstance(expr.op, Reduce), f"{expr.op} reduces nothing"
    return expr.op.kind


def maximum_of(expr: Expr) -> Expr:
    """The maximum of the values of a reduction."""
    return Expr(Reduce("max"), expr.args, expr.dtype)


def lanes_of(expr: Expr) -> list[str]:
    """Initial value and type of each lane of a loop."""
    more = [_ONLINE[kind]] if (kind := kind_of(expr)) in _ONLINE else []
    return [f"{start}, {TYPES[_dtype_of_lane(expr)]}" for start in (identity(expr), *more)]


def num_lanes(reductions: Collection[Expr]) -> int:
    """How many lanes a loop has for some reductions: a sum of exponentials also keeps the maximum."""
    shared = {maximum_of(expr) for expr in reductions if kind_of(expr) == "exponentials"}
    return sum(len(lanes_of(expr)) for expr in reductions if expr not in shared)


def updated(expr: Expr, lanes: Sequence[str], value: str) -> str:
    """The lanes updated with another value; a sum of exponentials takes a whole block at once."""
    match kind_of(expr):
        case "exponentials":
            return f"more_exponentials({lanes[0]}, {lanes[1]}, {value})"
        case "deviations":
            return f"one_more_deviation({lanes[0]}, {lanes[1]}, {value}, start // RBLOCK + 1)"
        case _:
            return _combined(expr, lanes[0], value)


def combined_lanes(expr: Expr, lanes: Sequence[str], size: str) -> str:
    """The result of a reduction, from the lanes of a whole loop, or from one block.

    Args:
        expr: the reduction.
        lanes: their names.
        size: how many values were reduced.
    """
    block, is_float = lanes[0], expr.dtype.is_floating_point
    match kind_of(expr):
        case "sum":
            return f"tl.sum({block}, 1)[:, None]"
        case "prod":
            return f"tl.reduce({block}, 1, product)[:, None]"
        case "max":
            return f"tl.reduce({block}, 1, greater)[:, None]" if is_float else f"tl.max({block}, 1)[:, None]"
        case "min":
            return f"tl.reduce({block}, 1, less)[:, None]" if is_float else f"tl.min({block}, 1)[:, None]"
        case "any":
            return f"tl.max({block}, 1)[:, None] != 0"
        case "all":
            return f"tl.min({block}, 1)[:, None] != 0"
        case "exponentials":
            return f"all_exponentials({lanes[0]}, {lanes[1]})"
        case "deviations":
            return f"all_deviations({lanes[0]}, {lanes[1]}, {size})"


def identity(expr: Expr) -> str:
    """The neutral element of a reduction."""
    dtype = expr.dtype
    match kind_of(expr):
        case "sum" | "any" | "exponentials" | "deviations":
            return "0"
        case "prod" | "all":
            return "1"
        case "max":
            return 'float("-inf")' if dtype.is_floating_point else str(torch.iinfo(dtype).min)
        case "min":
            return 'float("inf")' if dtype.is_floating_point else str(torch.iinfo(dtype).max)


def _combined(expr: Expr, total: str, value: str) -> str:
    nan = ", propagate_nan=tl.PropagateNan.ALL" if expr.dtype.is_floating_point else ""
    match kind_of(expr):
        case "prod":
            return f"{total} * {value}"
        case "max" | "any":
            return f"tl.maximum({total}, {value}{nan})"
        case "min" | "all":
            return f"tl.minimum({total}, {value}{nan})"
        case _:
            return f"{total} + {value}"


def _dtype_of_lane(expr: Expr) -> torch.dtype:
    return torch.int32 if expr.dtype is torch.bool else expr.dtype


# Reductions that need another one of the same values, made in one loop with it.
#
# A softmax sums `exp(value - maximum)`, a variance squares of `value - mean`. A loop that does not know the
# maximum or the mean yet takes that of the values so far, and corrects the sum when it changes. So what no
# block holds is read once, not twice.


def online(kernel: Kernel) -> Kernel:
    """The kernel with online reductions for those that need another one first (softmax, variance)."""
    roots = [store.value for store in kernel.stores]
    made: dict[Expr, Expr] = {}
    for expr in every_part(roots):
        same = Expr(expr.op, tuple(made[arg] for arg in expr.args), expr.dtype)
        made[expr] = _paired(same, kernel.num_reduced) or same
    stores = tuple(replace(store, value=made[store.value]) for store in kernel.stores)
    return replace(kernel, stores=stores)


def _paired(expr: Expr, count: Whole) -> Expr | None:
    if expr.op != Reduce("sum"):
        return None
    match expr.args[0]:
        case Expr("exp", (Expr("sub", (value, most)),)):
            return _exponentials(value, most)
        case Expr("mul", (Expr("sub", (value, mean)) as off, other)):
            is_variance = off == other and _is_mean(mean, value, count)
            return Expr(Reduce("deviations"), (value,), expr.dtype) if is_variance else None
        case _:
            return None


def _exponentials(value: Expr, most: Expr) -> Expr | None:
    """The sum of `exp(value - most)`, if `most` is the maximum of the values.

    `logsumexp` subtracts 0 in the place of an infinite maximum: then the sum is infinite, or 0.
    """
    total = Expr(Reduce("exponentials"), (value,), value.dtype)
    greatest = maximum_of(total)
    if most == greatest:
        return total
    zero, infinite = constant(0, value.dtype), constant(math.inf, value.dtype)
    is_infinite = elementwise("eq", elementwise("abs", greatest), infinite, dtype=torch.bool)
    if most != elementwise("where", is_infinite, zero, greatest, dtype=value.dtype):
        return None
    is_positive = elementwise("eq", greatest, infinite, dtype=torch.bool)
    of_infinite = elementwise("where", is_positive, infinite, zero, dtype=value.dtype)
    return elementwise("where", is_infinite, of_infinite, total, dtype=value.dtype)


def _is_mean(expr: Expr, value: Expr, count: Whole) -> bool:
    """Whether `expr` is the sum of `value`, divided by `count`."""
    match expr:
        case Expr("div", (Expr(op, args), divisor)):
            return op == Reduce("sum") and args == (value,) and divisor == counted(count, expr.dtype)
        case _:
            return False
