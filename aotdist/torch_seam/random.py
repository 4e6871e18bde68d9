"""Random number generators."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from aotdist.torch_seam.patches import Patch


def generator_id(generator: torch.Generator) -> int:
    """A number that two Python objects share exactly when they are one generator; an operator wraps anew."""
    return generator._cdata


def default_generator_is(generator: torch.Generator) -> AbstractContextManager[None]:
    """`torch.random` seeds `generator` for the default one, and asks it for its state, in this thread."""
    return _DEFAULT.applied(generator)


class _DefaultGenerator:
    """What stands for the default generator in `torch.random`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_DEFAULT.value or torch.default_generator, name)


_DEFAULT = Patch[torch.Generator](
    "default_generator", lambda: [(torch.random, "default_generator", _DefaultGenerator())]
)
