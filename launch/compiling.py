"""The only place where the trainer meets the compiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from aotdist.launch.config import CompileOptions
from aotdist.settings import Settings


def compile_model(model: nn.Module, options: CompileOptions) -> None:
    """Compiles the model in place, unless the backend is `eager`."""
    if options.backend == "eager":
        return
    import aotdist

    aotdist.compile(model, backend=options.backend, settings=options.settings(Settings.from_environment()))


def compile_summary(model: nn.Module, options: CompileOptions) -> str | None:
    """What was compiled so far, for people; None when nothing is compiled."""
    if options.backend == "eager":
        return None
    import aotdist

    return str(aotdist.explain(model))


def uncompiled(options: CompileOptions) -> AbstractContextManager[None]:
    """Runs the model as it was written, for a call too rare to be worth an artifact of its own."""
    if options.backend == "eager":
        return nullcontext()
    import aotdist

    return aotdist.disable()
