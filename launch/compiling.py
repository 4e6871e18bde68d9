"""The only place where the trainer meets the compiler."""

from __future__ import annotations

from torch import nn

import aotdist
from aotdist.launch.config import CompileOptions
from aotdist.settings import Settings


def compile_model(model: nn.Module, options: CompileOptions) -> None:
    """Compiles the model in place, unless the backend is `eager`."""
    aotdist.compile(model, backend=options.backend, settings=options.settings(Settings.from_environment()))


def compile_summary(model: nn.Module, options: CompileOptions) -> str | None:
    """What was compiled so far, for people; None when nothing is compiled."""
    return None if options.backend == "eager" else str(aotdist.explain(model))
