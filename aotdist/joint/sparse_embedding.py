"""Embeddings with sparse gradients that skip a padding index.

Such a gradient has a row for each index that is not padding. How many these are depends on data: PyTorch's
formula asks for it (`nonzero`), which no trace can answer. In the graph the whole formula is one operator,
whose result is sparse, with as many rows as it may have at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")
_LIBRARY.define(
    "embedding_sparse_backward(Tensor grad, Tensor indices, SymInt num_weights, int padding_idx) -> Tensor"
)
_GRADIENT = torch.ops.aotdist.embedding_sparse_backward.default


@torch.library.impl(_LIBRARY, "embedding_sparse_backward", "CompositeExplicitAutograd")
def _gradient(grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int) -> Tensor:
    return torch.ops.aten.embedding_sparse_backward(grad, indices, num_weights, padding_idx, False)


def _without_padding(grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int) -> Tensor:
    return torch.ops.aten.embedding_sparse_backward(grad, indices, num_weights, -1, False)


torch.library.register_fake("aotdist::embedding_sparse_backward", _without_padding, lib=_LIBRARY)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, indices: Tensor, padding_idx: int, renorm: Mapping[str, Any]
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.num_weights, ctx.padding_idx = weight.size(0), padding_idx
        return functional.embedding(indices, weight, padding_idx, sparse=True, **renorm)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (indices,) = ctx.saved_tensors
        padding_idx = ctx.padding_idx % ctx.num_weights
        return _GRADIENT(grads[0], indices, ctx.num_weights, padding_idx), None, None, None


def embedding(
    input: Tensor,  # noqa: A002  (the name that callers use)
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`torch.nn.functional.embedding`, with a gradient that can be traced."""
    if sparse and padding_idx is not None and not scale_grad_by_freq:
        return _Embedding.apply(weight, input, padding_idx, {"max_norm": max_norm, "norm_type": norm_type})
    return functional.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
