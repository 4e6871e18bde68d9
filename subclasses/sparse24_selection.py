"""From a dense matrix to its 2:4 part, in the middle of a training step: `sparsify` is differentiable."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, cast

import torch

from aotdist.subclasses.sparse24 import Sparse24Tensor
from aotdist.subclasses.sparse24_operators import choose_24, mask_24
from aotdist.subclasses.sparse24_packing import MaskKind, require_packable

Gradient: TypeAlias = Literal["straight-through", "masked"]


def sparsify(
    dense: torch.Tensor,
    mask: MaskKind = "row",
    *,
    meta: torch.Tensor | None = None,
    gradient: Gradient = "straight-through",
    decay: float = 0.0,
) -> Sparse24Tensor:
    """The 2:4 part of a dense matrix, chosen by magnitude, now; differentiable.

    The gradient that reaches `dense` is that of the 2:4 matrix: all of it (`straight-through`: what was
    dropped learns as if it had been kept, and may be chosen again), or the kept half (`masked`). `decay` adds
    `decay * dense` to the gradient where nothing was kept, so that a choice settles.

    Args:
        dense: to choose from. Shapes: (R, C), C a multiple of 8; R too if `mask` is "transposable".
        mask: "row", or "transposable": then both `W` and `W.T` are 2:4, and packed.
        meta: metadata of an earlier choice, to be kept to; None chooses. Shapes: (R, C / 8) uint8.
        gradient: what the gradient is.
        decay: lambda of SR-STE.

    Raises:
        UnsupportedProgram: `dense` cannot be packed.

    Source: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch" (SR-STE),
    arXiv:2102.04010, section 3.2.
    """
    require_packable(dense, mask)
    return cast(Sparse24Tensor, _Sparsify.apply(dense, mask, meta, gradient, decay))


class _Sparsify(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        dense: torch.Tensor,
        mask: MaskKind,
        meta: torch.Tensor | None,
        gradient: Gradient,
        decay: float,
    ) -> Sparse24Tensor:
        both = mask == "transposable"
        # A copy of what is held: another choice may be written over it before this forward's backward.
        meta = choose_24(dense, transposable=both) if meta is None else meta.clone()
        sparse = Sparse24Tensor.from_choice(dense, meta, both=both)
        ctx.gradient, ctx.decay = gradient, decay
        ctx.save_for_backward(meta, dense if decay else None)
        ctx.set_materialize_grads(False)
        return sparse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None, None]:
        (grad,) = grads
        meta, dense = ctx.saved_tensors
        if isinstance(grad, Sparse24Tensor):
            grad = grad.to_dense()
        if grad is not None and ctx.gradient == "masked":
            grad = torch.where(mask_24(meta), grad, 0)
        if grad is not None and dense is not None:
            grad = grad + torch.where(mask_24(meta), 0, dense * ctx.decay)
        return grad, None, None, None, None
