"""Which operators the emitter has rules for, and why it leaves a node to a library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from aotdist.kernels import elementwise, reductions, shaping, views
from aotdist.kernels.index import Index, Var, unflat, variable
from aotdist.kernels.ir import Constant, Expr
from aotdist.kernels.polynomial import NotProved, Whole
from aotdist.kernels.rule import NotEmitted, Point, Reducing, Rule, View, held, sizes_of, val_of
from aotdist.kernels.spelling import TYPES
from aotdist.torch_seam.symbols import depends_on_data

_RULES: dict[Any, Rule] = {**elementwise.RULES, **views.RULES, **shaping.RULES, **reductions.RULES}


def rule_of(node: Node) -> Rule | None:
    """The rule of the operator that `node` calls, if there is one."""
    if node.op != "call_function":
        return None
    return (
        _RULES.get(node.target)
        or elementwise.RULES_BY_NAME.get(str(node.target))
        or views.rule_of_part(node)
        or reductions.rule_of_part(node)
    )


def obstacle(node: Node) -> str | None:
    """Why a call of an operator that returns a tensor is not emitted; None if it is."""
    if "on_host" in node.meta:
        return "on the CPU"
    rule = rule_of(node)
    if rule is None:
        is_draw = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        return "it draws eager's numbers, unless functional_rng=True" if is_draw else "no rule"
    try:
        _check_values(node)
        somewhere = _anywhere(sizes_of(node))
        if isinstance(rule, View):
            rule.place(node, somewhere)
        else:
            rule.value(_Trial(), node, Point(somewhere))
    except (NotEmitted, NotProved) as reason:
        return str(reason)
    return None


def _check_values(node: Node) -> None:
    values = [val_of(node), *(val_of(source) for source in _sources(node))]
    for value in values:
        numbers = value.shape if isinstance(value, torch.Tensor) else [value]
        if any(map(depends_on_data, numbers)):
            raise NotEmitted("a number that depends on data")
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            continue
        if not isinstance(value, torch.Tensor):
            raise NotEmitted("a number that differs from call to call")
        if any(type(size) is int and size == 0 for size in value.shape):
            raise NotEmitted("no elements")
        if value.dtype not in TYPES:
            raise NotEmitted(f"{value.dtype}".removeprefix("torch."))
        if value.is_conj() or value.is_neg() or value.layout is not torch.strided:
            raise NotEmitted("a tensor that is not plain memory")
        if value.device != values[0].device:
            raise NotEmitted("tensors on several devices")


def _sources(node: Node) -> Iterator[Node]:
    """The tensor inputs of a node; for a `getitem`, those of the operator with several results."""
    for source in node.all_input_nodes:
        if isinstance(val_of(source), (list, tuple)):
            yield from source.all_input_nodes
        else:
            yield source


def _anywhere(sizes: Sequence[Whole]) -> tuple[Index, ...]:
    return tuple(variable(Var("x", at, size)) for at, size in enumerate(sizes))


class _Trial:
    """A reader that reads nothing, to see whether a rule raises `NotEmitted`."""

    def read(self, node: Node, point: Point) -> Expr:
        return Expr(Constant(0), (), held(val_of(node).dtype))

    def reduced(self, sizes: Sequence[Whole]) -> tuple[Index, ...]:
        return unflat(variable(Var("r", 0, math.prod(sizes))), sizes)

    def rounded(self, value: Expr, dtype: torch.dtype) -> Expr:
        return value


def is_reducing(node: Node) -> bool:
    """Whether a node with a rule reduces."""
    return isinstance(rule_of(node), Reducing)
