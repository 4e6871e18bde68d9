"""Batch norms in evaluation mode, folded into the convolution or matrix product before them.

`(W x + b - mean) / sqrt(var + eps) * gamma + beta` is `(s W) x + (b - mean) s + beta`, with `s = gamma /
sqrt(var + eps)`. The new weights are computed in float64 and rounded once. Results differ from eager's by
rounding, since eager rounds between the two operators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from aotdist.codegen.decompose import inline
from aotdist.freezing.folding import constant_nodes
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
            folded, (x, weight, bias, *options) = _convolution, args
        case _ATEN.addmm.default if args[2] in constant and not before.kwargs:
            folded, (bias, x, weight), options = _product, args, []
        case _ATEN.mm.default if args[1] in constant:
            folded, (x, weight), bias, options = _product, args, None, []
        case _:
            return None
    if bias is not None and bias not in constant:
        return None
    of_norm = norm.weight, norm.bias, norm.mean, norm.var, norm.eps
    with gm.graph.inserting_before(before):
        call = gm.graph.call_function(folded, (of_norm, x, weight, bias, *options))
    call.meta = dict(before.meta)
    result = inline(gm.graph, call, folded, {})
    gm.graph.erase_node(call)
    return result


def _convolution(norm: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    shape = [-1] + [1] * (weight.dim() - 1)
    return _ATEN.convolution.default(x, *_folded(norm, weight, bias, shape), *options)


def _product(norm: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    scaled, shifted = _folded(norm, weight, bias, [1, -1])
    return _ATEN.addmm.default(shifted, x, scaled)


def _folded(norm: Any, weight: Tensor, bias: Tensor | None, shape: list[int]) -> tuple[Tensor, Tensor]:
    """Weight and bias with the norm folded in."""
    gamma, beta, mean, var, eps = norm
    scale, shift = torch.rsqrt(var.double() + eps), -mean.double()
    scale = scale if gamma is None else scale * gamma.double()
    shift = (shift if bias is None else shift + bias.double()) * scale
    shift = shift if beta is None else shift + beta.double()
    return (weight.double() * scale.view(shape)).to(weight.dtype), shift.to(weight.dtype)
