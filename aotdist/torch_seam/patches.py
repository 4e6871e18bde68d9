"""Functions of PyTorch replaced for the time of a context, and hooks where PyTorch has none."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

from aotdist.torch_seam.autograd import in_thread_of_engine

T = TypeVar("T")


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    """In this context, an attribute of `owner` is `value`; afterwards it is what it was.

    For all threads: `owner` is to be this thread's own.
    """
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Here(threading.local):
    """The values that this thread gave to patches, by their names."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}


_here = _Here()


def hand_on(mode: Any) -> None:
    """Threads of the autograd engine's that run a backward under `mode` see the values of this thread.

    The engine hands the modes on from the thread that asked for the backward, and no context variables.

    Args:
        mode: one that functionalises.
    """
    mode.values_of_patches = _here.values


def _values() -> dict[str, Any]:
    values = _here.values
    if values or not in_thread_of_engine():
        return values
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    return getattr(mode, "values_of_patches", values)


class Patch(Generic[T]):
    """Replaces functions of PyTorch while any thread asks for it.

    All threads then call the replacement, which looks at its thread's `value`: in one that did not ask, that
    is None, and the replacement has to do what the original does.

    Args:
        name: of the value; no two of them have the same.
        switch: called with True to replace the functions, with False to put the originals back.
    """

    _lock = threading.Lock()

    def __init__(self, name: str, switch: Callable[[bool], None]) -> None:
        self._name = name
        self._switch, self._num_users = switch, 0

    @property
    def value(self) -> T | None:
        """The value that this thread gave to `applied`; None outside of it."""
        return _values().get(self._name)

    @contextmanager
    def applied(self, value: T) -> Generator[None]:
        """Replace the functions for this thread, and let them find `value`."""
        values = _here.values
        before = values.get(self._name)
        values[self._name] = value
        self._count(+1)
        try:
            yield
        finally:
            self._count(-1)
            if before is None:
                del values[self._name]
            else:
                values[self._name] = before

    def _count(self, change: int) -> None:
        with self._lock:
            before, self._num_users = self._num_users, self._num_users + change
            if not before or not self._num_users:
                self._switch(bool(self._num_users))


def replaced_here(owner: Any, name: str, instead: Callable[..., Any]) -> AbstractContextManager[None]:
    """In this context and thread, the function `owner.name` is `instead`; for others it is what it was.

    Args:
        owner: a module, a class, or another object that is never gone.
        name: of the function, or method.
        instead: called with the function that was there, and then with its arguments.
    """
    return _patch_of(owner, name).applied(instead)


def is_replaced_here(owner: Any, name: str) -> bool:
    """Whether a `replaced_here` is in force in this thread."""
    return _patch_of(owner, name).value is not None


@functools.cache
def _patch_of(owner: Any, name: str) -> Patch[Callable[..., Any]]:
    before: list[Any] = []  # what `owner` has of its own, if anything

    def switch(hearing: bool) -> None:
        if hearing:
            before.extend([vars(owner)[name]] if name in vars(owner) else [])
            setattr(owner, name, dispatching(getattr(owner, name)))
        elif before:
            setattr(owner, name, before.pop())
        else:
            delattr(owner, name)

    def dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def here(*args: Any, **kwargs: Any) -> Any:
            instead = patch.value
            return original(*args, **kwargs) if instead is None else instead(original, *args, **kwargs)

        return here

    patch = Patch[Callable[..., Any]](f"{owner!r}.{name}", switch)
    return patch


def hearing_of_autocast(hear: Callable[[], None]) -> AbstractContextManager[None]:
    """In this context and thread, `hear` is called when an enabled `torch.autocast` is made."""

    def heard(
        make: Any,
        self: Any,
        device_type: str,
        dtype: Any = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if enabled:
            hear()
        make(self, device_type, dtype, enabled, cache_enabled)

    return replaced_here(torch.autocast, "__init__", heard)


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
