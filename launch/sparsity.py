"""The only place where the trainer makes its layers 2:4 sparse."""

from __future__ import annotations

from torch import nn

from aotdist.launch.config import Sparse24Options


def sparsify_model(model: nn.Module, options: Sparse24Options) -> str | None:
    """Makes the linear layers of the blocks 2:4, in place, before they are sharded; None when that is off.

    Returns:
        How many layers multiply by what, for people.

    Raises:
        BadSettings: the sizes of the model do not fit.
    """
    if options.mask == "off":
        return None
    import aotdist

    done = aotdist.sparsify_24(
        model, lambda path, _: path.startswith("blocks."), mask=options.mask, decay=options.decay
    )
    share = done.packed_bytes / done.dense_bytes
    return f"{len(done.converted)} layers, {options.mask} mask; packed, their weights take {share:.0%}"
