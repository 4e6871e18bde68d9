"""Finds losses of a linear layer's logits that nothing else reads, forward and backward.

What a program writes as `cross_entropy(linear(x, w).view(-1, V).float(), labels)` (N rows, D features, V
classes) is in its graph

    forward   mm [N, V] -> casts, views, slices of rows -> _log_softmax -> nll_loss_forward
    backward  nll_loss_backward -> _log_softmax_backward_data -> back along the same way [N, V]
              mm with w -> gradient of x [N, D]    mm with x -> gradient of w [V, D]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from aotdist.torch_seam.symbols import SYMBOLIC

_ATEN = torch.ops.aten
_SOFTMAX = _ATEN._log_softmax.default
_SOFTMAX_BACKWARD = _ATEN._log_softmax_backward_data.default
_NLL = _ATEN.nll_loss_forward.default
_NLL_BACKWARD = _ATEN.nll_loss_backward.default

WHOLE = frozenset({_SOFTMAX, _SOFTMAX_BACKWARD, _NLL, _NLL_BACKWARD})
"""Operators by which losses are recognised: the trace does not decompose them."""

VIEWS = frozenset({_ATEN.view.default, _ATEN._unsafe_view.default})
SLICE = _ATEN.slice.Tensor
_SAME_ROWS = frozenset(
    {
        torch.ops.prims.convert_element_type.default,
        _ATEN._to_copy.default,
        _ATEN.clone.default,
        _ATEN.alias.default,
        _ATEN.detach.default,
    }
)
MEAN, SUM = 1, 2
"""Reductions, as operators number them."""

_TRANSPOSES = frozenset({_ATEN.t.default, _ATEN.permute.default, _ATEN.transpose.int})
_ZEROS = frozenset({_ATEN.full.default, _ATEN.zeros.default, _ATEN.new_zeros.default})


@dataclass(frozen=True, slots=True)
class LossGradients:
    """The backward of a loss.

    Args:
        first: the node that takes the gradient of the loss.
        of_input: computes the gradient of the layer's input, if anything does.
        of_weight: computes that of its weight, if anything does.
    """

    first: Node
    of_input: Node | None
    of_weight: Node | None

    @property
    def arriving(self) -> Node:
        """The gradient of the loss."""
        return cast("Node", self.first.args[0])


@dataclass(frozen=True, slots=True)
class LinearLoss:
    """A loss of the logits of a linear layer.

    Args:
        product: makes the logits.
        weight: of the layer.
        way: the nodes between the logits and the softmax, in order.
        nll: makes the loss from log probabilities.
        result: the loss, which `nll` returns first.
        gradients: its backward, if the graph has one.
    """

    product: Node
    weight: Node
    way: tuple[Node, ...]
    nll: Node
    result: Node
    gradients: LossGradients | None

    @property
    def input(self) -> Node:
        """Of the layer."""
        return cast("Node", self.product.args[0])

    @property
    def labels(self) -> Node:
        """One for each row of probabilities."""
        return cast("Node", self.nll.args[1])

    @property
    def is_mean(self) -> bool:
        """Whether it is divided by the number of rows that count."""
        return cast("int", self.nll.args[3]) == MEAN

    @property
    def ignore_index(self) -> int:
        """The label of rows that do not count."""
        return cast("int", self.nll.args[4])


def linear_losses(graph: FxGraph) -> Iterator[LinearLoss]:
    """Every loss over logits that nothing else reads."""
    for nll in graph.find_nodes(op="call_function", target=_NLL):
        loss = _loss_at(nll)
        if loss is not None:
            yield loss


def _loss_at(nll: Node) -> LinearLoss | None:
    softmax, _, class_weights, reduction, _ = cast("tuple[Node, Node, Node | None, int, int]", nll.args)
    if class_weights is not None or reduction not in (MEAN, SUM):
        return None
    if softmax.target is not _SOFTMAX or softmax.meta["val"].dim() != 2:
        return None
    way, product = _way_to(softmax)
    weight = _transposed(product.args[1]) if product.target is _ATEN.mm.default else None
    picks = {pick.args[1]: pick for pick in nll.users}
    if weight is None or len(product.users) != 1 or not _is_static(product) or 0 not in picks:
        return None
    later = set(softmax.users) - {nll}
    if not later.issuperset(picks[1].users if 1 in picks else ()):
        return None
    gradients = _gradients(product, weight, later) if later else None
    if later and gradients is None:
        return None
    return LinearLoss(product, weight, way, nll, picks[0], gradients)


def _way_to(softmax: Node) -> tuple[tuple[Node, ...], Node]:
    """The nodes before the softmax that keep the dimension of classes, and the node that they start from."""
    steps: list[Node] = []
    node = softmax.all_input_nodes[0]
    while _keeps_classes(node) and len(node.users) == 1:
        steps.append(node)
        node = node.all_input_nodes[0]
    return tuple(reversed(steps)), node


def _keeps_classes(node: Node) -> bool:
    """Whether a node casts or copies rows, arranges them otherwise, or leaves some out."""
    if node.target in VIEWS:
        return _num_classes(node) == _num_classes(node.all_input_nodes[0])
    if node.target is SLICE:
        dim, _, num_left = slice_of(node)
        step = cast("int", node.args[4] if len(node.args) > 4 else 1)
        return step == 1 and num_left > 0 and dim != node.meta["val"].dim() - 1
    return node.target in _SAME_ROWS


def slice_of(node: Node) -> tuple[int, int, int]:
    """Which dimension is sliced, where the slice begins, and how many it leaves."""
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    dim = cast("int", node.args[1] if len(node.args) > 1 else 0) % before.dim()
    start, _, _ = slice(node.args[2] if len(node.args) > 2 else 0, None).indices(before.size(dim))
    return dim, start, after.size(dim)


def _num_classes(node: Node) -> int:
    value = node.meta["val"]
    return value.size(-1) if value.dim() else 0


def _is_static(product: Node) -> bool:
    return not any(isinstance(size, SYMBOLIC) for size in product.meta["val"].shape)


def _transposed(node: Any) -> Node | None:
    """The matrix that a node transposes, if it does."""
    if not isinstance(node, Node) or node.target not in _TRANSPOSES or node.meta["val"].dim() != 2:
        return None
    return (
        None if node.target is _ATEN.permute.default and node.args[1] != [1, 0] else node.all_input_nodes[0]
    )


def _gradients(product: Node, weight: Node, later: set[Node]) -> LossGradients | None:
    """The loss's backward, if it ends in the layer; `later` are its readers of probabilities."""
    by_target = {node.target: node for node in later}
    first, softmax = by_target.get(_NLL_BACKWARD), by_target.get(_SOFTMAX_BACKWARD)
    if len(later) != 2 or first is None or softmax is None:
        return None
    if softmax.args[0] is not first or set(first.users) != {softmax}:
        return None
    of_logits = _way_back(softmax)
    products = dict.fromkeys(
        reader for user in of_logits.users for reader in (user.users if _transposed(user) else (user,))
    )
    of_input = of_weight = None
    for reader in products:
        if reader.target is not _ATEN.mm.default:
            return None
        one, other = cast("tuple[Node, Node]", reader.args)
        if one is of_logits and _untransposed(other) == (weight, False):
            of_input = reader
        elif _untransposed(one) == (of_logits, True) and other is product.args[0]:
            of_weight = reader
        else:
            return None
    return LossGradients(first, of_input, of_weight) if products else None


def _untransposed(node: Node) -> tuple[Node, bool]:
    """The matrix behind any number of transposes, and whether their number is odd."""
    is_transposed = False
    while (source := _transposed(node)) is not None:
        node, is_transposed = source, not is_transposed
    return node, is_transposed


def _way_back(node: Node) -> Node:
    """The gradient of the logits: what follows from `node` by casts, views and padding of slices."""
    while len(node.users) == 1:
        (user,) = node.users
        if not (user.target in VIEWS | _SAME_ROWS or _fills_up(user, node)):
            break
        node = user
    return node


def _fills_up(node: Node, part: Node) -> bool:
    """Whether a node puts `part` into zeros."""
    if node.target is _ATEN.slice_backward.default:
        return True
    if node.target is not _ATEN.slice_scatter.default or node.args[1] is not part:
        return False
    zeros = cast("Node", node.args[0])
    filled_with = cast("float", zeros.args[1]) if zeros.target is _ATEN.full.default else 0
    return zeros.target in _ZEROS and filled_with == 0
