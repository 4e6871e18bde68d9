"""Version counters, by which autograd notices that a tensor which it saved was written."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from aotdist.torch_seam import preserved_version, set_version


def uncounted(target: torch.Tensor) -> AbstractContextManager[None]:
    """Let writes of `target` inside of the context leave its version counter alone."""
    return nullcontext() if target.is_inference() else preserved_version(target)


def bump(target: torch.Tensor, count: int) -> None:
    """Let the version counter of `target` be `count` higher."""
    if count and not target.is_inference():
        torch.autograd.graph.increment_version([target] * count)


def rewind(target: torch.Tensor, count: int) -> None:
    """Let the version counter of `target` be `count` lower: that many writes are about to be repeated."""
    if not target.is_inference():
        set_version(target, target._version - count)
