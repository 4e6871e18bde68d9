"""Version counters, by which autograd notices that a tensor which it saved was written."""

from __future__ import annotations

import torch

from aotdist.torch_seam import set_version


def bump(target: torch.Tensor, count: int) -> None:
    """Let the version counter of `target` be `count` higher."""
    if count and not target.is_inference():
        torch.autograd.graph.increment_version([target] * count)


def rewind(target: torch.Tensor, count: int) -> None:
    """Let the version counter of `target` be `count` lower: that many writes are about to be repeated."""
    if not target.is_inference():
        set_version(target, target._version - count)
