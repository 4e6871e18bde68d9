"""The process-wide modes that an artifact is specialised on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

import torch

from aotdist.torch_seam import device_of_context, dtensor_dispatch, kernel_choices

_AUTOCAST_DEVICES = ("cpu", "cuda")


class Ambient(NamedTuple):
    """What is on around a call. A tuple, so that comparing two takes 50 ns.

    `autocast` holds, for each device type where it is on, the device and its dtype; `dtensor` what contexts
    such as `loss_parallel` make of operators on DTensors; `device` where new tensors are made, if a context
    says so (`with torch.device(...)`); `kernels` which of them operators may choose from (`sdpa_kernel`).
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    deterministic: bool
    default_dtype: torch.dtype
    dtensor: Hashable
    device: torch.device | None
    kernels: tuple[bool, ...]


def ambient() -> Ambient:
    """What is on now; about 0.7 us."""
    return Ambient(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple((d, torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES if torch.is_autocast_enabled(d)),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        dtensor_dispatch(),
        device_of_context(),
        kernel_choices(),
    )
