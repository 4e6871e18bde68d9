"""The only place where the trainer has linear layers multiply in 8 bits, or 2:4 sparse."""

from __future__ import annotations

from torch import nn

from aotdist.launch.config import Float8Options, Sparse24Options


def convert_model(model: nn.Module, float8: Float8Options, sparse24: Sparse24Options) -> None:
    """Converts the linear layers of the blocks, in place, before they are sharded; what is `off` is not done.

    Raises:
        BadSettings: a recipe's package is missing, or the sizes do not fit.
    """
    import aotdist

    if sparse24.mask != "off":
        aotdist.sparsify_24(model, _in_a_block, mask=sparse24.mask, decay=sparse24.decay)
    if float8.recipe != "off":
        aotdist.to_float8(model, float8.recipe, filter=_in_a_block, float8_all_gather=float8.all_gather)


def _in_a_block(path: str, _: nn.Linear) -> bool:
    return path.startswith("blocks.")
