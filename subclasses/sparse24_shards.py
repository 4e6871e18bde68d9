"""2:4 matrices that are DTensors: every rank packs its own shard, so shards must hold whole groups."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor, Replicate

from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.sparse24_packing import COLUMNS_PER_BYTE, MaskKind
from aotdist.subclasses.sparse24_selection import Gradient, sparsify


def sparsify_shards(
    dense: DTensor,
    mask: MaskKind = "row",
    *,
    meta: torch.Tensor | None = None,
    gradient: Gradient = "straight-through",
    decay: float = 0.0,
) -> DTensor:
    """`sparsify` for a DTensor: a DTensor of the same placements whose local tensors are `Sparse24Tensor`s.

    No rank has to know another's shard: groups, and the tiles of a transposable mask, are whole in each.

    Args:
        dense: what to choose from, in shards or replicated.
        mask: as for `sparsify`.
        meta: metadata of an earlier choice, of the whole matrix; the same on every rank.
        gradient: as for `sparsify`.
        decay: as for `sparsify`.

    Raises:
        UnsupportedProgram: `dense` is a partial sum, or a shard boundary cuts a group.
    """
    require_whole_groups(dense, mask)
    local = sparsify(
        dense.to_local(),
        mask,
        meta=None if meta is None else _shard_like(meta, dense),
        gradient=gradient,
        decay=decay,
    )
    return DTensor.from_local(
        local,
        dense.device_mesh,
        dense.placements,
        run_check=False,
        shape=dense.shape,
        stride=dense.stride(),
    )


def require_whole_groups(dense: DTensor, mask: MaskKind) -> None:
    """Raise unless every shard can be packed by itself; all ranks come to the same answer.

    Raises:
        UnsupportedProgram: names the placements and what would do.
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
    """This rank's part of a whole matrix's metadata: eight columns are a byte, rows are rows."""
    whole = meta if isinstance(meta, DTensor) else _replicated(meta, dense)
    return whole.redistribute(placements=dense.placements).to_local()


def _replicated(meta: torch.Tensor, dense: DTensor) -> DTensor:
    return DTensor.from_local(meta, dense.device_mesh, [Replicate()] * len(dense.placements), run_check=False)
