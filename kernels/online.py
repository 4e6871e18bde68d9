"""Reductions that need another one of the same values, made in one loop with it.

A softmax sums exponentials of what values are less than the greatest of them, a variance squares of what
they are off their mean. A loop that does not know the greatest yet, or the mean, takes what it has found so
far, and corrects the sum when it finds another. So what no block holds is read once, not twice.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from aotdist.kernels.accumulation import greatest_of
from aotdist.kernels.ir import Expr, Kernel, Reduce, every_part
from aotdist.kernels.polynomial import Whole
from aotdist.kernels.rule import constant, counted, elementwise


def online(kernel: Kernel) -> Kernel:
    """The kernel with such pairs in the place of reductions that wait for others."""
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
    """The sum of exponentials of what values are less than `most`, if that is the greatest of them.

    `logsumexp` takes 0 in the place of an infinite one: the sum of what is less than that is infinite, or 0.
    """
    total = Expr(Reduce("exponentials"), (value,), value.dtype)
    greatest = greatest_of(total)
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
    """Whether an expression is the mean of so many values."""
    match expr:
        case Expr("div", (Expr(op, args), divisor)):
            return op == Reduce("sum") and args == (value,) and divisor == counted(count, expr.dtype)
        case _:
            return False
