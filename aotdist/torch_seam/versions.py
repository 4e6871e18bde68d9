"""The releases of torch that the tests pass on."""

from __future__ import annotations

import functools
import warnings

import torch

TESTED_TORCH = ((2, 11), (2, 14))
"""The oldest and the newest minor release."""


def minor_of(version: str) -> tuple[int, int]:
    """The first two numbers of a version (`2.13.0+cpu`, `2.15.0a0+git1234`)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


@functools.cache
def warn_of_untested_torch() -> None:
    """Warn, once for a process, that torch is newer than what the tests have passed on."""
    oldest, newest = (".".join(map(str, each)) for each in TESTED_TORCH)
    if minor_of(torch.__version__) > TESTED_TORCH[1]:
        warnings.warn(
            f"aotdist: torch {torch.__version__} is newer than torch {oldest} to {newest}, which aotdist "
            f"is tested with; if something fails, try a newer aotdist, or torch {newest}",
            stacklevel=2,
        )
