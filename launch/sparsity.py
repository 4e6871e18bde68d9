"""The only place where the trainer makes its layers 2:4 sparse."""

from __future__ import annotations

from torch import nn

from aotdist.launch.config import Sparse24Options


def sparsify_model(model: nn.Module, options: Sparse24Options) -> None:
    """Makes the linear layers of the blocks 2:4, in place, before they are sharded; unless that is `off`.

    Raises:
        BadSettings: the sizes of the model do not fit.
    """
    if options.mask == "off":
        return
    import aotdist

    aotdist.sparsify_24(
        model, lambda path, _: path.startswith("blocks."), mask=options.mask, decay=options.decay
    )
