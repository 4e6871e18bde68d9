"""`sparsify`: from a dense matrix to its 2:4 part, differentiable, for use in each training step.

Every rank packs its own shard of a DTensor, so shards must consist of whole groups.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.sparse24 import Sparse24Tensor
from aotdist.subclasses.sparse24_operators import choose_24, mask_24
from aotdist.subclasses.sparse24_packing import COLUMNS_PER_BYTE, MaskKind, require_packable

Gradient: TypeAlias = Literal["straight-through", "masked"]


def sparsify(
    dense: torch.Tensor,
    mask: MaskKind = "row",
    *,
    meta: torch.Tensor | None = None,
    gradient: Gradient = "straight-through",
    decay: float = 0.0,
) -> torch.Tensor:
    """The 2:4 part of a dense matrix, chosen by magnitude, as a `Sparse24Tensor`; differentiable.

    The gradient of `dense` is that of the 2:4 matrix: all of it (`straight-through`: dropped elements learn
    as if they had been kept, and may be chosen again), or the kept half (`masked`). `decay` adds `decay *
    dense` to the gradient of dropped elements, so that a choice settles.

    For a DTensor the result is a DTensor of the same placements, whose local part is a `Sparse24Tensor`.
    There is no communication: groups, and the tiles of a transposable mask, lie within a shard.

    Args:
        dense: to choose from. Shapes: (R, C), C a multiple of 8; R too if `mask` is "transposable".
        mask: "row", or "transposable": then both `W` and `W.T` are 2:4, and packed.
        meta: metadata of an earlier choice to use; None makes a choice. Shapes: (R, C / 8) uint8, of the
            whole matrix on every rank.
        gradient: what the gradient is.
        decay: lambda of SR-STE.

    Raises:
        UnsupportedProgram: `dense` cannot be packed; it is a partial sum, or a shard boundary cuts a group.

    Source: Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch" (SR-STE),
    arXiv:2102.04010, section 3.2.
    """
    if isinstance(dense, DTensor):
        _require_whole_groups(dense, mask)
        meta = None if meta is None else _shard_like(meta, dense)
        local = sparsify(dense.to_local(), mask, meta=meta, gradient=gradient, decay=decay)
        whole = (dense.device_mesh, dense.placements)
        return DTensor.from_local(local, *whole, run_check=False, shape=dense.shape, stride=dense.stride())
    require_packable(dense, mask)
    return _Sparsify.apply(dense, mask, meta, gradient, decay)


def _require_whole_groups(dense: DTensor, mask: MaskKind) -> None:
    """Raise unless every shard can be packed by itself; all ranks raise or none.

    Raises:
        UnsupportedProgram: names the placements and a size that would do.
    """
    if any(placement.is_partial() for placement in dense.placements):
        raise UnsupportedProgram(
            f"a partial sum ({dense.placements}) has no magnitudes to choose by",
            fix="redistribute it to `Replicate()` or `Shard()` first",
        )
    for dim, size in enumerate(dense.shape):
        sharing = zip(dense.placements, dense.device_mesh.shape, strict=True)
        num_shards = math.prod(ranks for placement, ranks in sharing if placement.is_shard(dim))
        cuts_groups = dim == dense.dim() - 1 or mask == "transposable"
        if num_shards > 1 and cuts_groups and size % (num_shards * COLUMNS_PER_BYTE):
            raise UnsupportedProgram(
                f"dimension {dim}, of {size}, is sharded {num_shards} ways, which cuts groups of four "
                f"(2:4, {mask} mask)",
                fix=f"make it a multiple of {num_shards * COLUMNS_PER_BYTE}, or shard the other dimension",
            )


def _shard_like(meta: torch.Tensor, dense: DTensor) -> torch.Tensor:
    """This rank's part of the whole matrix's metadata, sharded as `dense` is."""
    whole = meta if isinstance(meta, DTensor) else _replicated(meta, dense)
    return whole.redistribute(placements=dense.placements).to_local()


def _replicated(meta: torch.Tensor, dense: DTensor) -> DTensor:
    return DTensor.from_local(meta, dense.device_mesh, [Replicate()] * len(dense.placements), run_check=False)


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
        # A copy, since the held choice may be renewed before the backward of this forward.
        kept = choose_24(dense, transposable=both) if meta is None else meta.clone()
        sparse = Sparse24Tensor.from_choice(dense, kept, both=both)
        ctx.gradient, ctx.decay = gradient, decay
        ctx.save_for_backward(kept, dense if decay else None)
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
