"""Replaces functions of PyTorch inside of a context, for one thread; and the locks that all threads share."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

from aotdist.torch_seam.autograd import in_thread_of_engine

T = TypeVar("T")

LOCKS: list[threading.RLock] = []
"""All that `process_lock` has made."""


def process_lock() -> threading.RLock:
    """A lock that all threads share, and that is never gone."""
    LOCKS.append(threading.RLock())
    return LOCKS[-1]


def is_owned(lock: Any) -> bool:
    """Whether this thread holds a lock; for `threading.RLock` alone."""
    return lock._is_owned()


def free_in_child(locks: Iterable[Any]) -> None:
    """In a forked process, free the locks of threads that do not exist in it."""
    for lock in locks:
        if not is_owned(lock):
            lock._at_fork_reinit()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Generator[None]:
    """In this context, an attribute of `owner`, which no other thread has, is `value`."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


_ABSENT: Any = object()
Place: TypeAlias = tuple[Any, str, Any]
"""A module, a class or another object that is never gone, the name of an attribute, and its replacement."""


class _Here(threading.local):
    """The values that this thread gave to patches, by their names."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}


_here = _Here()


def hand_on(mode: Any) -> None:
    """Let the engine's threads that run a backward under `mode` use the values of this thread.

    The engine passes dispatch modes from the thread that called `backward` to its own threads; it passes no
    context variables.

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
    """Replaces attributes of PyTorch, or of Python, while at least one thread has it applied.

    This package replaces attributes in no other way, and `PATCHES` has all patches. All threads then call the
    replacement, which reads the `value` of its thread. In a thread that has not applied the patch, that is
    None, and the replacement does what the original does.

    Args:
        name: of the value; no two of them have the same.
        places: returns what is replaced, and by what; called once, when the patch is first applied.
    """

    lock = process_lock()
    """Held while attributes are replaced or put back."""

    def __init__(self, name: str, places: Callable[[], Iterable[Place]]) -> None:
        self._name, self._places_of = name, places
        self._before: dict[tuple[int, str], tuple[Any, Any]] = {}
        self._threads: set[int] = set()
        self._is_applied = False
        PATCHES[name] = self

    @functools.cached_property
    def places(self) -> tuple[Place, ...]:
        """What is replaced, and by what."""
        return tuple(self._places_of())

    @property
    def value(self) -> T | None:
        """The value that this thread gave to `applied`; None outside of it."""
        return (_here.values or _values()).get(self._name)

    def original(self, owner: Any, name: str) -> Any:
        """What `owner.name` was before it was last replaced."""
        return self._before[id(owner), name][1]

    @contextmanager
    def applied(self, value: T) -> Generator[None]:
        """Replace the attributes for this thread, and let them find `value`."""
        values = _here.values
        before = values.get(self._name)
        values[self._name] = value
        try:
            self.settle()
            yield
        finally:
            if before is None:
                values.pop(self._name, None)
            else:
                values[self._name] = before
            self.settle()

    def settle(self) -> None:
        """Replace the attributes if a thread has a value, put them back if none has."""
        with self.lock:
            note = self._threads.add if self._name in _here.values else self._threads.discard
            note(threading.get_ident())
            if (wanted := bool(self._threads)) is self._is_applied:
                return
            self._is_applied = wanted
            for place in self.places:
                self._replace(*place) if wanted else self._put_back(*place)

    def settle_in_child(self) -> None:
        """In a forked process, drop the other threads: only the one that calls this exists."""
        self._threads &= {threading.get_ident()}
        self.settle()

    def _replace(self, owner: Any, name: str, instead: Any) -> None:
        self._before[id(owner), name] = _held_by(owner, name), getattr(owner, name, None)
        setattr(owner, name, instead)

    def _put_back(self, owner: Any, name: str, instead: Any) -> None:
        if _held_by(owner, name) is not instead:
            return  # somebody else has replaced it since
        held, _ = self._before[id(owner), name]
        if held is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, held)


PATCHES: dict[str, Patch[Any]] = {}
"""All patches, by name."""


def _held_by(owner: Any, name: str) -> Any:
    """The entry in the `__dict__` of `owner`, absent if inherited; for `__code__`, the code of a function."""
    return owner.__code__ if name == "__code__" else vars(owner).get(name, _ABSENT)


def settle_in_child() -> None:
    """In a forked process, put back what threads replaced that do not exist in it."""
    for patch in PATCHES.values():
        patch.settle_in_child()


def caller_of_replaced() -> types.FrameType:
    """The frame that called a replaced function; for the function that `replaced_here` is given to ask."""
    return sys._getframe(3)  # behind this function, the one that asks, and `here`


def replaced_here(owner: Any, name: str, instead: Callable[..., Any]) -> AbstractContextManager[None]:
    """In this context and thread, the function `owner.name` is `instead`; for others it is what it was.

    Args:
        owner: a module, a class, or another object that is never gone.
        name: of the function, or method.
        instead: called with the function that was there, and then with its arguments.
    """
    return _patch_of(owner, name).applied(instead)


@contextmanager
def all_replaced_here(*places: Place) -> Generator[None]:
    """`replaced_here` for several functions: the owner of each, its name, and what is called instead."""
    with ExitStack() as stack:
        for place in places:
            stack.enter_context(replaced_here(*place))
        yield


def replaced_besides(owner: Any, name: str, instead: Callable[..., Any]) -> AbstractContextManager[None]:
    """As `replaced_here`, but `instead` is given a replacement that is in force, in place of the original."""
    patch = _patch_of(owner, name)
    if (outer := patch.value) is None:
        return patch.applied(instead)
    return patch.applied(lambda original, *args: instead(functools.partial(outer, original), *args))


@functools.cache
def _patch_of(owner: Any, name: str) -> Patch[Callable[..., Any]]:
    @functools.wraps(getattr(owner, name))
    def here(*args: Any, **kwargs: Any) -> Any:
        instead, original = patch.value, patch.original(owner, name)
        return original(*args, **kwargs) if instead is None else instead(original, *args, **kwargs)

    is_static = name == "__new__" or isinstance(inspect.getattr_static(owner, name), staticmethod)
    place = owner, name, staticmethod(here) if is_static else here
    patch = Patch[Callable[..., Any]](f"{owner!r}.{name}", lambda: [place])
    return patch


@contextmanager
def formulas_under_modes() -> Generator[None]:
    """Backwards that start inside run their formulas under all torch-function modes that are on now.

    `torch.autograd.grad` and `backward` are torch functions, so each mode is off for as long as they run.
    """
    modes = overrides._get_current_function_mode_stack()

    def run(original: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        with ExitStack() as stack:
            for mode in modes[torch._C._len_torch_function_stack() :]:
                stack.enter_context(mode)
            return original(*args, **kwargs)

    with replaced_here(torch.autograd, "_engine_run_backward", run):
        yield


def intercept_autocast(callback: Callable[[], None]) -> AbstractContextManager[None]:
    """In this context and thread, `callback` is called when an enabled `torch.autocast` is made."""

    def intercepted(
        make: Any,
        self: Any,
        device_type: str,
        dtype: Any = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if enabled:
            callback()
        make(self, device_type, dtype, enabled, cache_enabled)

    return replaced_here(torch.autocast, "__init__", intercepted)


def intercept_saved_tensor_hooks(mode: TorchFunctionMode) -> AbstractContextManager[None]:
    """Saved-tensor hooks that this thread registers in the context run under `mode`.

    Autograd calls them inside of another torch function, where torch-function modes are off.
    """

    def make(
        original: Any, self: Any, pack_hook: Callable[..., Any], unpack_hook: Callable[..., Any]
    ) -> None:
        original(self, _within(mode, pack_hook), _within(mode, unpack_hook))

    return replaced_here(torch.autograd.graph.saved_tensors_hooks, "__init__", make)


def _within(mode: TorchFunctionMode, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(hook)
    def intercepted(value: Any) -> Any:
        is_on = mode in overrides._get_current_function_mode_stack()
        with nullcontext() if is_on else mode:
            return hook(value)

    return intercepted
