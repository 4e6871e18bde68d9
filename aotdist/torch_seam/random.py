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


def times_seeded_elsewhere() -> int:
    """How often threads without a generator of their own have set the default one by `torch.random`."""
    return _INSTEAD.times_seeded


class _DefaultGenerator:
    """What stands for the default generator in `torch.random`."""

    times_seeded = 0

    def __getattr__(self, name: str) -> Any:
        if (own := _DEFAULT.value) is not None:
            return getattr(own, name)
        self.times_seeded += name in ("manual_seed", "seed", "set_state")
        return getattr(torch.default_generator, name)


_INSTEAD = _DefaultGenerator()


_DEFAULT = Patch[torch.Generator](
    "default_generator", lambda: [(torch.random, "default_generator", _INSTEAD)]
)
