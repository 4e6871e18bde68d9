"""Torch-function and dispatch modes, and the `__torch_function__` of classes: how to switch them off."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

T = TypeVar("T")


class OutOfDynamo:
    """A base of dispatch modes that are on while Dynamo is off (`frames_off`).

    PyTorch switches Dynamo off for each call of another mode, in 5 us: twelve for each operator of a trace.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


no_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes
"""Every dispatch mode is off: real tensors can be computed with in the middle of a trace."""


@contextmanager
def unrecorded_numbers() -> Generator[None]:
    """What is computed with symbolic numbers is not traced: a product takes 30 us instead of 200."""
    key = torch._C._TorchDispatchModeKey.PROXY
    tracing = torch._C._unset_dispatch_mode(key)
    try:
        yield
    finally:
        if tracing is not None:
            torch._C._set_dispatch_mode(tracing)


dispatch_keys_kept: Callable[[], AbstractContextManager[Any]] = torch._C._PreserveDispatchKeyGuard
"""Restores, afterwards, which dispatch keys this thread includes and excludes.

An internal assertion of PyTorch that fails inside of `jvp` leaves autograd excluded (torch 2.13): from
then on nothing in the process requires grad.
"""


@contextmanager
def users_modes_off() -> Generator[None]:
    """The user's dispatch modes are off: a `FlopCounterMode` must not count the operators of a trace.

    PyTorch's own modes for tracing (fake tensors), which are beneath them, stay on.
    """
    modes = torch.utils._python_dispatch
    popped: list[Any] = []
    while (count := torch._C._len_torch_dispatch_stack()) > 0:
        if torch._C._get_dispatch_stack_at(count - 1).is_infra_mode():
            break
        popped.append(modes._pop_mode())
    try:
        yield
    finally:
        for mode in reversed(popped):
            modes._push_mode(mode)


def set_aside(dispatch: Callable[..., T]) -> Callable[..., T]:
    """Decorates the `__torch_dispatch__` of a tracing mode, which PyTorch takes off the stack meanwhile.

    PyTorch puts the mode back afterwards, and aborts the process if its place is taken: by the mode itself,
    if an interrupt came while a `with self` was left.
    """

    @functools.wraps(dispatch)
    def dispatching(mode: Any, *args: Any, **kwargs: Any) -> T:
        try:
            return dispatch(mode, *args, **kwargs)
        except BaseException:
            if torch._C._get_dispatch_mode(mode._mode_key) is not None:
                torch._C._unset_dispatch_mode(mode._mode_key)
            raise

    return dispatching


torch_functions_off: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction
"""No `__torch_function__` is called, neither of modes nor of subclasses."""


class_functions_off: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""No `__torch_function__` of a subclass is called; those of modes are."""


class_functions_on: Callable[[], AbstractContextManager[Any]] = torch._C._EnableTorchFunction
"""Every `__torch_function__` is called, whatever an outer context switched off."""


class_functions_are_on: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Whether the `__torch_function__` of classes is called."""


python_kernels: Callable[[], AbstractContextManager[Any]] = enable_python_dispatcher
"""Kernels in Python take precedence over those in C++, some of which specialise symbolic sizes."""


def num_modes() -> tuple[int, int]:
    """How many modes are on, of torch functions and of operators."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def under_transform() -> bool:
    """Whether a `torch.func` transform (`grad`, `vmap`, `jvp`) or forward-mode differentiation is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
