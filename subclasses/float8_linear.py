"""Linear layers that multiply in 8 bits: delayed scaling, and a scale for each block.

The classes have no constructors: `to_float8` assigns them to the `__class__` of an `nn.Linear`, which keeps
its identity, its parameters and its hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from aotdist.subclasses.float8_blocks import SQUARE, TILE, Block
from aotdist.subclasses.float8_gather import precise_weight
from aotdist.subclasses.float8_tensor import (
    E4M3,
    E5M2,
    Float8Tensor,
    amax_of,
    block_amax,
    cast,
    on_local,
    quantise,
    scale_for,
    settled,
)
from aotdist.torch_seam.autograd import in_backward
from aotdist.torch_seam.dtensor import local_part

INPUT, WEIGHT, GRAD = 0, 1, 2
"""Rows of an amax history."""


class Float8Linear(nn.Linear):
    """The part that both recipes share: flattening, autocast, the bias."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Shapes: (..., in_features) -> (..., out_features), in the dtype of `input` or of autocast."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        with torch.autocast(kind, enabled=False):  # it would cast the 8-bit operands
            product = self.product(settled(input.flatten(0, -2) if input.dim() > 1 else input.unsqueeze(0)))
        product = product.unflatten(0, input.shape[:-1]) if input.dim() > 1 else product.squeeze(0)
        bias: Any = self.bias
        return product if bias is None else product + bias.to(product.dtype)

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Shapes: (tokens, in_features) -> (tokens, out_features)."""
        raise NotImplementedError


class DelayedFloat8Linear(Float8Linear):
    """Scales from the largest magnitudes of earlier steps, so that casting waits for no reduction.

    The history is a buffer in `state_dict`, so training resumes bit for bit. A checkpoint without one (of the
    model before it was converted) loads too. Ranks that read different data have different histories;
    `torch.distributed.checkpoint` saves one of them, as of any buffer.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433; the recipe is that of
    NVIDIA's Transformer Engine (`DelayedScaling`).

    Attributes:
        amax_history: fp32 (3, steps + 1): of input, weight and gradient, the latest first. Forward writes the
            first two rows while training, backward the third. One column more than is looked at: see
            `_cast_delayed`.
    """

    amax_history: torch.Tensor

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Shapes: (tokens, in_features) -> (tokens, out_features)."""
        return _DelayedProduct.apply(rows, self.weight, local_part(self.amax_history), self.training)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            destination[f"{prefix}weight"] = precise_weight(destination[f"{prefix}weight"])

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        whole = {f"{prefix}amax_history": self.amax_history, **state_dict}
        super()._load_from_state_dict(whole, prefix, *args, **kwargs)


class BlockwiseFloat8Linear(Float8Linear):
    """A scale for each 1x128 of activations and gradients, and for each 128x128 of weights.

    An outlier costs accuracy in its own block only, so gradients are e4m3, too.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, section 3.3.2.
    """

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Shapes: (tokens, in_features) -> (tokens, out_features)."""
        return _BlockwiseProduct.apply(rows, self.weight)


def new_history(weight: torch.Tensor, num_steps: int) -> torch.Tensor:
    """An amax history of `weight` alone.

    Shapes: -> (3, num_steps + 1), fp32.
    """
    history = torch.zeros(3, num_steps + 1, device=weight.device)
    history[WEIGHT] = amax_of(weight)
    return history


class _DelayedProduct(torch.autograd.Function):
    """`rows @ weight.T`; each operand is cast once, with a scale from earlier steps."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, history: torch.Tensor, training: bool
    ) -> torch.Tensor:
        """Shapes: (M, K), (N, K), (3, steps + 1) -> (M, N)."""
        rows8 = _cast_delayed(rows, history, INPUT, E4M3, training=training)
        weight8 = _cast_delayed(weight, history, WEIGHT, E4M3, training=training, stands_for=rows.dtype)
        ctx.save_for_backward(rows8, weight8)
        ctx.history, ctx.training, ctx.weight_dtype = history, training, weight.dtype
        return torch.mm(rows8, weight8.t())

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the names
        ctx: Any, *grads: torch.Tensor
    ) -> Any:
        """Shapes: (M, N) -> (M, K), (N, K)."""
        rows8, weight8 = ctx.saved_tensors
        (grad,) = grads
        with torch.autocast(grad.device.type, enabled=False):
            grad8 = _cast_delayed(settled(grad), ctx.history, GRAD, E5M2, training=ctx.training)
            grad_rows = torch.mm(grad8, weight8) if ctx.needs_input_grad[0] else None
            grad_weight = torch.mm(grad8.t(), rows8).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None
        return grad_rows, grad_weight, None, None


def _cast_delayed(
    x: torch.Tensor,
    history: torch.Tensor,
    operand: Literal[0, 1, 2],
    dtype: torch.dtype,
    *,
    training: bool,
    stands_for: torch.dtype | None = None,
) -> torch.Tensor:
    """`x` in 8 bits, scaled by the history of this operand; in training, `x` is added to the history.

    When a checkpoint recomputes the layer in the backward, it must cast as the forward did: the newest entry
    of the history is skipped, the extra last column is used, and nothing is written.
    """
    if _is_float8(x):  # a weight that FSDP2 gathered so, see `float8_gather`
        return x
    recomputes = operand != GRAD and in_backward()
    seen = history[operand, 1:] if recomputes else history[operand, :-1]
    x8 = cast(x, scale_for(seen.max(), dtype), dtype, stands_for=stands_for)
    if training and not recomputes:
        amax = amax_of(x)
        # An overflow must not spoil the scales of later steps.
        latest = torch.where(amax.isfinite(), amax, 0.0)
        history[operand].copy_(torch.cat([latest.reshape(1), history[operand, :-1]]))
    return x8


def _is_float8(x: torch.Tensor) -> bool:
    return isinstance(local_part(x), Float8Tensor)


class _BlockwiseProduct(torch.autograd.Function):
    """`rows @ weight.T`; the weight's gradient sums over tokens, so its operands are cast anew."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Shapes: (M, K), (N, K) -> (M, N)."""
        weight8 = _cast_blocks(weight, SQUARE, stands_for=rows.dtype)
        ctx.save_for_backward(rows, weight8)
        ctx.weight_dtype = weight.dtype
        return torch.mm(_cast_blocks(rows, TILE), weight8.t())

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the names
        ctx: Any, *grads: torch.Tensor
    ) -> Any:
        """Shapes: (M, N) -> (M, K), (N, K)."""
        rows, weight8 = ctx.saved_tensors
        grad = settled(grads[0])
        grad_rows = grad_weight = None
        with torch.autocast(grad.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_rows = torch.mm(_cast_blocks(grad, TILE), weight8)
            if ctx.needs_input_grad[1]:
                by_tokens = _cast_blocks(grad.t(), TILE), _cast_blocks(rows.t(), TILE)
                grad_weight = torch.mm(by_tokens[0], by_tokens[1].t()).to(ctx.weight_dtype)
        return grad_rows, grad_weight


def _cast_blocks(x: torch.Tensor, block: Block, *, stands_for: torch.dtype | None = None) -> torch.Tensor:
    """`x` in e4m3 with a scale for each block; the blocks of a DTensor are those of each rank's part."""
    wide = stands_for or x.dtype

    def cast_part(part: torch.Tensor) -> torch.Tensor:
        scale = scale_for(block_amax(part, block), E4M3)
        return Float8Tensor(quantise(part, scale, E4M3, block), scale, wide, block, part.size())

    return on_local(cast_part, x)
