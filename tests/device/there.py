"""Compares with eager on another device, from arguments that are made on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.kernels.reference import assert_same, outcome
from tests.op_db.samples import copies

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""A GPU's `exp`, `rsqrt` and division are approximate, and products are added before they are rounded."""


def same_on(device: torch.device, **tolerance: float) -> Callable[..., None]:
    """What `assert_same` is, for tensors of the CPU that are taken to a device first."""
    return partial(_assert_same_on, device, tolerance or CLOSE)


def _assert_same_on(
    device: torch.device, tolerance: dict[str, float], program: Callable[..., Any], *args: torch.Tensor
) -> None:
    assert_same(program, *copies(args, device), **tolerance)


def eagers_on(device: torch.device) -> Callable[..., bool]:
    """Says whether a program runs eagerly there, given arguments of the CPU."""

    def runs(program: Callable[..., Any], *args: torch.Tensor) -> bool:
        if not args:
            return False  # where it computes is written in it
        try:
            outcome(program, copies(args, device))
        except Exception:
            return False
        return True

    return runs
