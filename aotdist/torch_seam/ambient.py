"""State that a call depends on: default device, kernel choices, autocast, generators, warning filters."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import re
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, TypeAlias

import torch

# One C++ check of grad mode, autocast, deterministic algorithms, default dtype, threads and precision.
from torch._C._dynamo.guards import GlobalStateGuard as GlobalStateGuard
from torch.nn.attention import SDPBackend
from torch.utils._device import DeviceContext

from aotdist.torch_seam.patches import Patch, process_lock


def fills_uninitialized_memory() -> bool:
    """Whether deterministic algorithms write to memory that `torch.empty` leaves as it is."""
    return bool(torch.utils.deterministic.fill_uninitialized_memory)  # type: ignore[attr-defined]


_KERNELS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (
        functools.partial(getattr, torch.backends.mha, "_is_fastpath_enabled"),
        torch.backends.mha.set_fastpath_enabled,
    ),
)
KERNEL_CHOICES = tuple(may_choose for may_choose, _ in _KERNELS)
"""Functions that return whether operators may choose each of these kernels.

For attention: flash, memory-efficient, math, cuDNN. For convolutions and recurrent layers: oneDNN, cuDNN.
For attention layers in evaluation: the fast path, one kernel for the whole layer.
"""


def kernel_choices() -> tuple[bool, ...]:
    """Whether operators may choose each of the kernels; see `KERNEL_CHOICES`."""
    return tuple(choice() for choice in KERNEL_CHOICES)


def attention_kernels() -> list[SDPBackend]:
    """The kernels that attention may choose from, in this process's order of preference.

    PyTorch puts cuDNN first on some GPUs once it has initialised one. Which cuDNN another machine has cannot
    be known, so here cuDNN stays last, unless the program orders otherwise.
    """
    flash, efficient, formula, cudnn, *_ = kernel_choices()
    allowed = {
        SDPBackend.FLASH_ATTENTION: flash,
        SDPBackend.EFFICIENT_ATTENTION: efficient,
        SDPBackend.MATH: formula,
        SDPBackend.CUDNN_ATTENTION: cudnn,
    }
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]
    return [kernel for kernel in order if allowed.get(kernel)]


def uses_onednn() -> bool:
    """Whether operators may choose oneDNN's kernels."""
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()


def choose_kernels(choices: tuple[bool, ...]) -> None:
    """Restore what `kernel_choices` returned."""
    for (_, choose), choice in zip(_KERNELS, choices, strict=True):
        choose(choice)


def device_of_context() -> torch.device | None:
    """The default device of new tensors, if a context or `torch.set_default_device` sets one."""
    # `torch.get_default_device` takes 5 us, and is itself a torch function, which the modes of a trace see.
    num_modes = torch._C._len_torch_function_stack()
    if not num_modes:
        return None
    for position in reversed(range(num_modes)):
        mode = torch._C._get_function_stack_at(position)
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any device."""


AUTOCAST_DEVICES = ("cpu", "cuda")
"""Kinds of devices whose autocast a program may ask for."""

AutocastState: TypeAlias = tuple[bool, tuple[tuple[str, bool, torch.dtype], ...]]
"""Whether casts are cached, and for each kind of device whether autocast is on, and its dtype."""


def autocast_state() -> AutocastState:
    """How autocast is set for this thread."""
    of_kinds = (
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in AUTOCAST_DEVICES
    )
    return torch.is_autocast_cache_enabled(), tuple(of_kinds)


def put_autocast(state: AutocastState) -> None:
    """Restore what `autocast_state` returned."""
    is_cached, of_kinds = state
    torch.set_autocast_cache_enabled(is_cached)
    for kind, is_on, dtype in of_kinds:
        torch.set_autocast_enabled(kind, is_on)
        torch.set_autocast_dtype(kind, dtype)


@contextmanager
def own_autocast_cache() -> Generator[None]:
    """Autocast's cache of cast parameters is empty when the context begins, and emptied when it ends."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def autocast_only(devices: Sequence[tuple[str, torch.dtype]]) -> Generator[None]:
    """Autocast on for these devices, and off for all others."""
    with ExitStack() as stack:
        stack.enter_context(autocast_off())
        for device, dtype in devices:
            stack.enter_context(torch.autocast(device, dtype=dtype))
        yield


autocast_off: Callable[[], AbstractContextManager[Any]] = torch._C._DisableAutocast
"""Autocast disabled on every device, whatever is on outside."""


def generator_id(generator: torch.Generator) -> int:
    """A number that two Python objects share exactly when they wrap one generator."""
    return generator._cdata


def default_generator_is(generator: torch.Generator) -> AbstractContextManager[None]:
    """In this thread, `torch.random` (`manual_seed`, `get_rng_state`) uses `generator` as the default one."""
    return _DEFAULT.applied(generator)


def times_seeded_elsewhere() -> int:
    """How often `torch.random` has seeded the default generator, in threads that have no other one."""
    return _INSTEAD.times_seeded


class _DefaultGenerator:
    """Replaces the default generator in `torch.random`."""

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


class _Here:
    """The message pattern of a warnings filter: matches only in the thread that made it, until it is off."""

    def __init__(self, pattern: re.Pattern[str] | None) -> None:
        self._pattern, self.thread = pattern, threading.get_ident()

    def match(self, text: str) -> bool:
        is_here = threading.get_ident() == self.thread
        return is_here and (self._pattern is None or self._pattern.match(text) is not None)

    def turn_off(self) -> None:
        self.thread = 0  # no thread's


_filters_change = process_lock()


@contextmanager
def warnings_no_errors() -> Generator[None]:
    """In this context and thread, what filters of warnings make errors of is shown instead, as a warning.

    For compilers of others, which go on after what they warn about. Filters are those of all threads, and of
    two `catch_warnings` that overlap the second restores what the first had set: so each filter that raises
    gets one before it that shows, and that other threads do not match.
    """
    shown: list[Any] = []
    with _filters_change:
        filters: Any = warnings.filters
        for position, (action, message, *rest) in reversed([*enumerate(filters)]):
            if action == "error":
                shown.append(("always", _Here(message), *rest))
                filters.insert(position, shown[-1])
    try:
        yield
    finally:
        with _filters_change:
            for own in shown:
                own[1].turn_off()  # a `catch_warnings` of another thread may have a copy that it restores
                for held in (filters, warnings.filters):
                    with suppress(ValueError):
                        held.remove(own)
