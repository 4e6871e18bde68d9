"""The only place where the trainer meets the compiler, and what converts linear layers for it."""

from __future__ import annotations

from torch import nn

import aotdist
from aotdist.launch.config import CompileOptions, Float8Options, Sparse24Options
from aotdist.settings import Settings


def compile_model(model: nn.Module, options: CompileOptions) -> None:
    """Compiles the model in place, unless the backend is `eager`."""
    aotdist.compile(model, backend=options.backend, settings=options.settings(Settings.from_environment()))


def compile_summary(model: nn.Module, options: CompileOptions) -> str | None:
    """What was compiled so far, for people; None when nothing is compiled."""
    return None if options.backend == "eager" else str(aotdist.explain(model))


def convert_model(model: nn.Module, float8: Float8Options, sparse24: Sparse24Options) -> None:
    """Converts the linear layers of the blocks in place, to 8 bits, or 2:4 sparse; what is `off` is not done.

    To be called before they are sharded.

    Raises:
        BadSettings: a recipe's package is missing, or the sizes do not fit.
    """
    if sparse24.mask != "off":
        aotdist.sparsify_24(model, _in_a_block, mask=sparse24.mask, decay=sparse24.decay)
    if float8.recipe != "off":
        aotdist.to_float8(model, float8.recipe, filter=_in_a_block, float8_all_gather=float8.all_gather)


def _in_a_block(path: str, _: nn.Linear) -> bool:
    return path.startswith("blocks.")
