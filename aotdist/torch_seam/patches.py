"""Functions of PyTorch replaced for the time of a context, and hooks where PyTorch has none."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

T = TypeVar("T")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    """In this context, an attribute of `owner` is `value`; afterwards it is what it was."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Patch(Generic[T]):
    """Replaces functions of PyTorch while any thread asks for it.

    All threads then call the replacement, which looks at its thread's `value`: in one that did not ask, that
    is None, and the replacement has to do what the original does.

    Args:
        name: of the context variable that holds the value.
        switch: called with True to replace the functions, with False to put the originals back.
    """

    _lock = threading.Lock()

    def __init__(self, name: str, switch: Callable[[bool], None]) -> None:
        self._value: ContextVar[T | None] = ContextVar(name, default=None)
        self._switch, self._num_users = switch, 0

    @property
    def value(self) -> T | None:
        """The value that this thread gave to `applied`; None outside of it."""
        return self._value.get()

    @contextmanager
    def applied(self, value: T) -> Generator[None]:
        """Replace the functions for this thread, and let them find `value`."""
        token = self._value.set(value)
        self._count(+1)
        try:
            yield
        finally:
            self._count(-1)
            self._value.reset(token)

    def _count(self, change: int) -> None:
        with self._lock:
            before, self._num_users = self._num_users, self._num_users + change
            if not before or not self._num_users:
                self._switch(bool(self._num_users))


def hearing_of_autocast(hear: Callable[[], None]) -> AbstractContextManager[None]:
    """In this context, `hear` is called when an enabled `torch.autocast` is made, for any device."""
    make = torch.autocast.__init__

    @functools.wraps(make)
    def heard(self: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any) -> None:
        if enabled:
            hear()
        make(self, device_type, dtype, enabled, *args)

    return replaced(torch.autocast, "__init__", heard)


def saved_tensor_hooks_heard_by(mode: TorchFunctionMode) -> AbstractContextManager[None]:
    """Hooks of saved tensors that this thread makes in the context run under `mode`.

    Autograd calls them in the middle of another torch function, where torch-function modes are off.
    """
    return _SAVED_TENSOR_HOOKS.applied(mode)


_make_saved_tensor_hooks = torch.autograd.graph.saved_tensors_hooks.__init__


def _hook_saved_tensor_hooks(hearing: bool) -> None:
    made = _make_heard_hooks if hearing else _make_saved_tensor_hooks
    torch.autograd.graph.saved_tensors_hooks.__init__ = made


_SAVED_TENSOR_HOOKS = Patch[TorchFunctionMode]("saved_tensor_hookers", _hook_saved_tensor_hooks)


@functools.wraps(_make_saved_tensor_hooks)
def _make_heard_hooks(self: Any, pack_hook: Callable[..., Any], unpack_hook: Callable[..., Any]) -> None:
    mode = _SAVED_TENSOR_HOOKS.value
    hooks = pack_hook, unpack_hook
    _make_saved_tensor_hooks(self, *(hooks if mode is None else (_within(mode, hook) for hook in hooks)))


def _within(mode: TorchFunctionMode, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(hook)
    def heard(value: Any) -> Any:
        is_on = mode in overrides._get_current_function_mode_stack()
        with nullcontext() if is_on else mode:
            return hook(value)

    return heard
