"""Converts the sizes of a graph for index arithmetic: to numbers, or to sums of products of symbols."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.fx import Node

from aotdist.kernels.polynomial import NotProved, Whole, symbol
from aotdist.torch_seam.symbols import expression, hint, least_of, products_of, surely_equal, symbols_in

_known: WeakKeyDictionary[Any, dict[Any, Whole]] = WeakKeyDictionary()
"""Numbers that were converted before, by the environment of their symbols and by expression."""


def whole(number: int | torch.SymInt) -> Whole:
    """A whole number for index arithmetic."""
    if isinstance(number, int):
        return number
    converted = _known.setdefault(number.node.shape_env, {})
    key = number.node.expr
    if key not in converted:
        converted[key] = _sum_of_products(number)
    return converted[key]


def natural(number: int | torch.SymInt) -> Whole:
    """A size or a stride, which is never below 0: if that cannot be proved, it becomes a symbol of its own.

    One that the trace's guards say is 1 is the number 1, so that tensors are broadcast by it.
    """
    if not isinstance(number, int) and hint(number) == 1 and surely_equal([number], [1]):
        return 1
    found = whole(number)
    return found if isinstance(found, int) or found.is_natural else _symbol(number, 0)


def arguments_for(names: Sequence[str], sizes: Mapping[str, Node]) -> list[Node]:
    """The arguments of a graph that are the values of symbols.

    Args:
        names: of the symbols.
        sizes: the graph's numbers, by expression.

    Raises:
        NotProved: no argument is one of them.
    """
    for name in names:
        if name not in sizes:
            raise NotProved(f"{name}, which no argument of the graph gives")
    return [sizes[name] for name in names]


def _sum_of_products(number: torch.SymInt) -> Whole:
    products = products_of(number)
    return sum(scale * math.prod(map(_factor, factors)) for scale, factors in products)


def _factor(number: torch.SymInt) -> Whole:
    return _symbol(number, least_of(number))


def _symbol(number: Any, least: int | None) -> Whole:
    name = expression(number)
    return symbol(
        name if name.isidentifier() else f"({name})", symbols_in(number), least=least, hint=hint(number)
    )
