"""Finds what smoothed labels add to a loss, forward and backward.

`cross_entropy(..., label_smoothing=s)` of V classes is two losses that share their log probabilities:

    forward   nll_loss_forward(p) -> times 1 - s
              sum(p, [1]) -> neg -> masked -> sum -> over what counts -> times s / V -> add both
    backward  arriving -> times 1 - s -> nll_loss_backward
              arriving -> times s / V -> over what counts -> masked -> neg -> to all classes -> add both

It is divided by what counts for a mean only.
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any, cast

import torch
from torch.fx import Node

_ATEN = torch.ops.aten
_SUM_OF_ROWS = _ATEN.sum.dim_IntList
_NEG, _SUM, _DIV = _ATEN.neg.default, _ATEN.sum.default, _ATEN.div.Tensor
_TIMES, _ADD = _ATEN.mul.Scalar, _ATEN.add.Tensor
_MASKED = frozenset({_ATEN.masked_fill.Scalar, _ATEN.where.self})
_TO_ALL = _ATEN.expand.default

MEAN, SUM = 1, 2
"""Reductions, as operators number them."""


def smoothed(nll: Node, result: Node) -> tuple[Node, Node, float] | None:
    """What labels are smoothed for, from the loss without it.

    Args:
        nll: makes the loss from log probabilities.
        result: that loss.

    Returns:
        the reader of log probabilities that is not `nll`, the smoothed loss, and how much it is smoothed.
    """
    log_probabilities = cast("Node", nll.args[0])
    rows = next((user for user in log_probabilities.users if user.target is _SUM_OF_ROWS), None)
    if rows is None or rows.args[1] not in ([1], [-1]) or len(rows.args) > 2:
        return None
    part = _then(rows, {_NEG})
    masked = _then(part, _MASKED)
    ignored = _ignored(masked, part)
    if ignored is None or not _is_of(ignored, nll):
        return None
    part = _then(masked, {_SUM})
    if nll.args[3] == MEAN:
        part, whole = _then(part, {_DIV}), part
        if part is None or part.args[0] is not whole or not _counts(part.args[1], ignored):
            return None
    part, rest = _then(part, {_TIMES}), _then(result, {_TIMES})
    both = _then(part, {_ADD})
    if part is None or rest is None or both is None or set(both.args) != {part, rest} or both.kwargs:
        return None
    share, left = cast("float", part.args[1]), cast("float", rest.args[1])
    num_classes = log_probabilities.meta["val"].size(1)
    is_whole = math.isclose(share * num_classes + left, 1.0, rel_tol=1e-9)
    return (rows, both, 1.0 - left) if is_whole else None


def arriving_at(gradient: Node, nll_backward: Node, amount: float) -> Node | None:
    """The gradient of a smoothed loss from which that of log probabilities follows; None if it is another's.

    Args:
        gradient: that of log probabilities.
        nll_backward: computes its part for labels.
        amount: how much they are smoothed.
    """
    both = cast("tuple[Node, Node]", gradient.args)
    if gradient.target is not _ADD or nll_backward not in both or set(nll_backward.users) != {gradient}:
        return None
    (part,) = (node for node in both if node is not nll_backward)
    steps: list[Container[Any]] = [{_TO_ALL}, {_ATEN.unsqueeze.default}, {_NEG}, _MASKED, {_TO_ALL}]
    for targets in (*steps, {_DIV}) if nll_backward.args[4] == MEAN else steps:
        if part.target not in targets:
            return None
        part = cast("Node", part.args[2] if part.target is _ATEN.where.self else part.args[0])
    rest = cast("Node", nll_backward.args[0])
    if part.target is not _TIMES or rest.target is not _TIMES or part.args[0] is not rest.args[0]:
        return None
    share = cast("float", part.args[1]) * gradient.meta["val"].size(1)
    left = cast("float", rest.args[1])
    is_same = math.isclose(share, amount, rel_tol=1e-9) and math.isclose(left, 1.0 - amount, rel_tol=1e-9)
    return cast("Node", rest.args[0]) if is_same else None


def _then(node: Node | None, targets: Container[Any]) -> Node | None:
    """What alone reads a node, if it calls one of some operators."""
    users = [] if node is None else list(node.users)
    return users[0] if len(users) == 1 and users[0].target in targets else None


def _ignored(masked: Node | None, part: Node | None) -> Node | None:
    """Which rows are zeros instead of a part."""
    if masked is None or part is None:
        return None
    if masked.target is _ATEN.masked_fill.Scalar:
        return cast("Node", masked.args[1]) if masked.args[2] == 0 else None
    ignored, zero, other = cast("tuple[Node, Node, Node]", masked.args)
    is_zero = zero.target is _ATEN.scalar_tensor.default and zero.args[0] == 0
    return ignored if is_zero and other is part else None


def _is_of(ignored: Node, nll: Node) -> bool:
    return ignored.target is _ATEN.eq.Scalar and ignored.args == (nll.args[1], nll.args[4])


def _counts(divisor: Any, ignored: Node) -> bool:
    """Whether a divisor is how many rows are not ignored."""
    if not isinstance(divisor, Node) or divisor.target is not _SUM:
        return False
    counted = cast("Node", divisor.args[0])
    return counted.target is _ATEN.bitwise_not.default and counted.args[0] is ignored
