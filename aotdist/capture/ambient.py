"""The process-wide modes that an artifact is specialised on."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.ambient import (
    AUTOCAST_DEVICES,
    KERNEL_CHOICES,
    GlobalStateGuard,
    autocast_state,
    choose_kernels,
    device_of_context,
    kernel_choices,
    put_autocast,
)
from aotdist.torch_seam.dtensor import dtensor_dispatch

_WORDS = {
    "grad": "`torch.set_grad_enabled`",
    "inference": "`torch.inference_mode`",
    "autocast": "`torch.autocast`",
    "casting": "the dtypes of autocast, or whether it casts a parameter once",
    "deterministic": "`torch.use_deterministic_algorithms`",
    "default_dtype": "`torch.set_default_dtype`",
    "device": "`torch.set_default_device`",
    "kernels": "which kernels operators may choose from",
}
"""What the user calls to switch each mode, for errors."""


class Ambient(NamedTuple):
    """The modes around a call. A tuple, so that comparing two is quick.

    Attributes:
        grad: whether grad mode is on.
        inference: whether inference mode is.
        autocast: each device type for which autocast is on, with its dtype.
        casting: whether autocast caches casts of parameters, and its default dtype for each device type.
        deterministic: whether deterministic algorithms are used.
        default_dtype: the dtype of new floating-point tensors.
        dtensor: the operators on DTensors that contexts such as `loss_parallel` replace.
        device: of new tensors, if a context sets it (`with torch.device(...)`).
        kernels: which kernels operators and attention layers may choose from (`sdpa_kernel`).
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    casting: tuple[bool, tuple[torch.dtype, ...]]
    deterministic: bool
    default_dtype: torch.dtype
    dtensor: Hashable
    device: torch.device | None
    kernels: tuple[bool, ...]


def _casting() -> tuple[bool, tuple[torch.dtype, ...]]:
    cpu, cuda = AUTOCAST_DEVICES
    return torch.is_autocast_cache_enabled(), (torch.get_autocast_dtype(cpu), torch.get_autocast_dtype(cuda))


def ambient() -> Ambient:
    """The modes of this thread now; takes about 3 us."""
    return Ambient(
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple((d, torch.get_autocast_dtype(d)) for d in AUTOCAST_DEVICES if torch.is_autocast_enabled(d)),
        _casting(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        dtensor_dispatch(),
        device_of_context(),
        kernel_choices(),
    )


def ambient_guard(at_capture: Ambient) -> Callable[[], bool]:
    """A guard that returns whether the modes are those of the capture.

    It takes 1.1 us after it has held once: PyTorch compares a snapshot of most modes in C++, and `_OTHERS`
    has the rest. The snapshot also contains what no artifact depends on (the number of threads), so if it
    differs, all modes are compared, and a new one is taken.
    """
    held: tuple[GlobalStateGuard, tuple[Any, ...]] | None = None

    def modes_hold() -> bool:
        nonlocal held
        if held is not None and held[0].check() and tuple(map(operator.call, _OTHERS)) == held[1]:
            return True
        if ambient() != at_capture:
            return False
        held = GlobalStateGuard(), tuple(map(operator.call, _OTHERS))
        return True

    return modes_hold


_OTHERS: tuple[Callable[[], Any], ...] = (
    torch.is_inference_mode_enabled,
    torch.is_autocast_cache_enabled,  # the snapshot has what autocast does only while it is on
    *(functools.partial(torch.get_autocast_dtype, device) for device in AUTOCAST_DEVICES),
    dtensor_dispatch,
    device_of_context,
    *KERNEL_CHOICES,
)
"""Functions that read the modes that are not in PyTorch's snapshot."""


@contextmanager
def modes_left_alone() -> Generator[None]:
    """Refuse a program that leaves a mode switched; the modes of before are restored in any case.

    Raises:
        UnsupportedProgram: a mode differs when the context ends.
    """
    before, level, casting = ambient(), torch.get_deterministic_debug_mode(), autocast_state()
    try:
        yield
    finally:
        after = ambient()
        if after != before:
            torch.set_grad_enabled(before.grad)
            torch.set_default_dtype(before.default_dtype)
            torch.set_deterministic_debug_mode(level)
            choose_kernels(before.kernels)
            put_autocast(casting)
    for name, words in _WORDS.items():
        if getattr(before, name) != getattr(after, name):
            raise UnsupportedProgram(
                f"the program switches a mode ({words}) and leaves it so when it returns",
                stage="capture",
                fix="switch it in a context (`with torch.no_grad():`), or outside of the compiled function",
            )
