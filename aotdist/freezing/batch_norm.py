"""Batch norms in evaluation mode, folded into the convolution or matrix product before them.

`(W x + b - mean) / sqrt(var + eps) * gamma + beta` is `(s W) x + (b - mean) s + beta`, with `s = gamma /
sqrt(var + eps)`. The new weights are computed in float64 and rounded once. Results differ from eager's by
rounding, since eager rounds between the two operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node

from aotdist.freezing.folding import constant_nodes
from aotdist.passes.editing import emit
from aotdist.torch_seam.operators import OpOverload, argument_names

_ATEN = torch.ops.aten

_NORMS = frozenset(
    {
        _ATEN._native_batch_norm_legit_no_training.default,
        _ATEN._native_batch_norm_legit.default,
        _ATEN._batch_norm_no_update.default,
        _ATEN.native_batch_norm.default,
        _ATEN.cudnn_batch_norm.default,
        _ATEN.miopen_batch_norm.default,
    }
)


def fold_batch_norms(gm: GraphModule, state: set[str]) -> None:
    """Fold each batch norm that is the only user of a convolution or matrix product into its weights.

    Args:
        gm: the graph; it is edited.
        state: names of the inputs that are parameters and buffers.
    """
    constant = constant_nodes(gm, state)
    for node in list(gm.graph.nodes):
        norm = _Norm.of(node, constant)
        if norm is None or norm.before.users.keys() - {node}:
            continue
        before = _with_norm(gm, norm, constant)
        if before is not None:
            for pick in list(node.users):
                pick.replace_all_uses_with(before)
                gm.graph.erase_node(pick)
            gm.graph.erase_node(node)
            gm.graph.erase_node(norm.before)
            constant = constant_nodes(gm, state)


@dataclass(frozen=True, slots=True)
class _Norm:
    """A batch norm whose statistics and weights are constants; `before` is the node that it normalises."""

    before: Node
    weight: Node | None
    bias: Node | None
    mean: Node
    var: Node
    eps: float

    @classmethod
    def of(cls, node: Node, constant: set[Node]) -> _Norm | None:
        """Read a node; None unless it is such a batch norm, and only its first result is used."""
        if node.target not in _NORMS or any(pick.args[1] != 0 for pick in node.users):
            return None
        names = argument_names(cast("OpOverload", node.target))
        given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        weight, bias = given.get("weight"), given.get("bias")
        mean, var = given["running_mean"], given["running_var"]
        known = all(part is None or part in constant for part in (weight, bias, mean, var))
        if given.get("training") or mean is None or var is None or not known:
            return None
        return cls(given["input"], weight, bias, mean, var, given["eps" if "eps" in given else "epsilon"])


def _with_norm(gm: GraphModule, norm: _Norm, constant: set[Node]) -> Node | None:
    """One node for the convolution or product and the norm behind it; None if it is another operator."""
    before = norm.before
    args: list[Any] = list(before.args)
    match before.target:
        case _ATEN.convolution.default if args[1] in constant and not args[6]:
            weight, bias = args[1], args[2]
            shape = [-1] + [1] * (weight.meta["val"].dim() - 1)
        case _ATEN.addmm.default if args[2] in constant and not before.kwargs:
            weight, bias, shape = args[2], args[0], [1, -1]
        case _ATEN.mm.default if args[1] in constant:
            weight, bias, shape = args[1], None, [1, -1]
        case _:
            return None
    if bias is not None and bias not in constant:
        return None
    with gm.graph.inserting_before(before):
        scaled, shifted = _scaled(gm.graph, norm, weight, bias, shape)
        if before.target is _ATEN.convolution.default:
            target, new = before.target, (args[0], scaled, shifted, *args[3:])
        else:
            target, new = _ATEN.addmm.default, (shifted, args[0 if bias is None else 1], scaled)
        return emit(gm.graph, target, new, like=before)


def _scaled(
    graph: torch.fx.Graph, norm: _Norm, weight: Node, bias: Node | None, shape: list[int]
) -> tuple[Node, Node]:
    """Weight and bias with the norm folded in."""

    def call(target: OpOverload, *args: Any, **kwargs: Any) -> Node:
        return emit(graph, target, args, like=norm.before, kwargs=kwargs)

    def exact(node: Node) -> Node:
        return call(_ATEN._to_copy.default, node, dtype=torch.float64)

    dtype = weight.meta["val"].dtype
    scale = call(_ATEN.rsqrt.default, call(_ATEN.add.Tensor, exact(norm.var), norm.eps))
    if norm.weight is not None:
        scale = call(_ATEN.mul.Tensor, scale, exact(norm.weight))
    shift = call(_ATEN.neg.default, exact(norm.mean))
    if bias is not None:
        shift = call(_ATEN.add.Tensor, shift, exact(bias))
    shift = call(_ATEN.mul.Tensor, shift, scale)
    if norm.bias is not None:
        shift = call(_ATEN.add.Tensor, shift, exact(norm.bias))
    scaled = call(_ATEN.mul.Tensor, exact(weight), call(_ATEN.view.default, scale, shape))
    return tuple(call(_ATEN._to_copy.default, part, dtype=dtype) for part in (scaled, shift))  # type: ignore[return-value]
