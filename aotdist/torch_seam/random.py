"""Random number generators."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch

from aotdist.torch_seam.autograd import in_thread_of_engine
from aotdist.torch_seam.patches import replaced


def generator_id(generator: torch.Generator) -> int:
    """A number that two Python objects share exactly when they are one generator; an operator wraps anew."""
    return generator._cdata


def default_generator_is(generator: torch.Generator) -> AbstractContextManager[None]:
    """`torch.random` seeds `generator` for the default one, and asks it for its state, in this thread.

    In threads of the autograd engine's, too: they run backwards of this one.
    """
    stand_in = _DefaultGenerator(generator, torch.random.default_generator)
    return replaced(torch.random, "default_generator", stand_in)


class _DefaultGenerator:
    """What stands for the default generator in `torch.random`."""

    def __init__(self, generator: torch.Generator, elsewhere: Any) -> None:
        self._generator, self._elsewhere = generator, elsewhere
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        is_here = threading.get_ident() == self._thread or in_thread_of_engine()
        return getattr(self._generator if is_here else self._elsewhere, name)
