"""What a compilation changes in its thread and in the process is put back, whatever interrupts it.

A `KeyboardInterrupt` may arrive anywhere: before a context that was entered has begun to watch, or while one
is left. No context can be made safe against that, so none has to be: the state is read before a compilation
begins, when nothing has been changed, and what is another afterwards is set to what was read. That is done
twice, so that an interrupt which arrives while it is done for the first time does no harm.
"""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import gc
import os
import threading
import traceback
import warnings
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, TypeVar

import torch
from torch import _guards
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.utils import _python_dispatch

from aotdist.torch_seam import ambient, patches
from aotdist.torch_seam.dynamo import dynamo_locks
from aotdist.torch_seam.undo import (
    LOCKS,
    free_in_child,
    interrupt_behind,
    is_owned,
    led_to,
    note_in,
    raise_interrupt,
    release,
)

R = TypeVar("R")
_NOWHERE: Any = object()


def restoring(run: Callable[[], R]) -> R:
    """Run a compilation; if an exception leaves it, the state of thread and process is that of before."""
    before = _Before()
    try:
        try:
            return before.run(run)
        except BaseException as error:
            before.put_back(error)
            raise_interrupt(error)
            raise
        finally:
            before.end()
    except BaseException as error:
        before.put_back(error)
        raise
    finally:
        before.end()


class _Before:
    """The state of thread and process before a compilation."""

    running: _Before | None = None
    """Of the compilation that runs."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._undo: list[Callable[[], None]] = []
        self._free = [lock for lock in LOCKS if not is_owned(lock)]
        self._of_thread = [part.read() for part in _OF_THREAD]
        self._of_process = [part.read() for part in _OF_PROCESS]

    def run(self, run: Callable[[], R]) -> R:
        """Run the compilation; context variables that it sets are set if no exception leaves it."""
        _Before.running = self
        note_in(self._undo)
        context = copy_context()
        result = context.run(run)
        for variable, value in context.items():
            if variable.get(_NOWHERE) is not value:
                variable.set(value)
        return result

    def end(self) -> None:
        """It is over."""
        note_in(None)
        _Before.running = None

    def put_back(self, error: BaseException) -> None:
        """Set what is another now.

        What belongs to all threads, and may have been set by one of them, is left as it is by an ordinary
        exception: that one left every context as it should.
        """
        is_interrupt = interrupt_behind(error) is not None
        if is_interrupt:  # contexts that frames hold which are gone would be closed when it is forgotten
            for one in led_to(error):
                traceback.clear_frames(one.__traceback__)
        release(self._free)
        _put_back(_OF_THREAD, self._of_thread)
        if is_interrupt:
            while self._undo:  # each once: an earlier one would put back what a later one has undone
                self._undo[-1]()
                self._undo.pop()
            self.put_back_process()

    def put_back_process(self) -> None:
        """Set what belongs to all threads."""
        _put_back(_OF_PROCESS, self._of_process)


def _in_child() -> None:
    """In a process that was forked, nothing is left of what other threads of its parent were at."""
    free_in_child((*LOCKS, *dynamo_locks()))
    patches.settle_in_child()
    running = _Before.running
    if running is not None and running.thread != threading.get_ident():
        running.put_back_process()
        running.end()


os.register_at_fork(after_in_child=_in_child)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of the state.

    Args:
        read: returns it.
        put_back: sets it to what was read; may be interrupted, and called again.
    """

    read: Callable[[], Any]
    put_back: Callable[[Any], None]


def _put_back(parts: tuple[_Part, ...], values: list[Any]) -> None:
    for part, value in zip(parts, values, strict=True):
        if part.read() != value:
            part.put_back(value)


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(at) for at in range(torch._C._len_torch_function_stack())]


def _put_function_modes(modes: list[Any]) -> None:
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


_KINDS_OF_MODES = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def _dispatch_modes() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(at) for at in range(torch._C._len_torch_dispatch_stack())]


def _put_dispatch_modes(modes: list[Any]) -> None:
    for kind in _KINDS_OF_MODES:
        if torch._C._get_dispatch_mode(kind) is not None:
            torch._C._unset_dispatch_mode(kind)
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    for mode in modes:
        torch._C._push_on_torch_dispatch_stack(mode)


_KEYS = tuple(torch._C.DispatchKey.__members__.values())


def _dispatch_keys() -> tuple[Any, Any]:
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def _put_dispatch_keys(sets: tuple[Any, Any]) -> None:
    setters = (
        torch._C._dispatch_tls_set_dispatch_key_included,
        torch._C._dispatch_tls_set_dispatch_key_excluded,
    )
    for set_key, keys, now in zip(setters, sets, _dispatch_keys(), strict=True):
        for key in _KEYS:
            if keys.has(key) != now.has(key):
                set_key(key, keys.has(key))


def _put_dual_level(level: int) -> None:
    while forward_ad._current_level > level:
        torch._C._exit_dual_level(level=forward_ad._current_level)
        forward_ad._current_level -= 1


def _autocast_nesting() -> int:
    # Called from C, so that nothing can come between the two.
    counts = tuple(
        map(methodcaller("__call__"), (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))
    )
    return counts[1]


def _put_autocast_nesting(nesting: int) -> None:
    while _autocast_nesting() > nesting:
        torch.autocast_decrement_nesting()
    while _autocast_nesting() < nesting:
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


def _put_message(message: str | None) -> None:
    hooks = torch._C._autograd
    hooks._saved_tensors_hooks_enable() if message is None else hooks._saved_tensors_hooks_disable(message)


def _variables(names: tuple[str, ...], owner: Any) -> _Part:
    """Global variables of a module of PyTorch's, or what it keeps for this thread."""

    def put_back(values: list[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(owner, name, value)

    return _Part(lambda: [getattr(owner, name, None) for name in names], put_back)


_OF_THREAD = (
    _Part(torch._C._get_torch_function_state, torch._C._set_torch_function_state),
    _Part(_function_modes, _put_function_modes),
    _Part(
        torch._C._functorch.get_dynamic_layer_stack_depth,
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth,
    ),
    _Part(lambda: forward_ad._current_level, _put_dual_level),
    _Part(_dispatch_modes, _put_dispatch_modes),
    _variables(
        (
            "_is_in_torch_dispatch_mode",
            "_is_in_non_infra_torch_dispatch_mode",
            "_is_in_any_mode_without_ignore_compile_internals",
        ),
        _python_dispatch,
    ),
    _Part(_dispatch_keys, _put_dispatch_keys),
    _Part(torch.is_grad_enabled, torch._C._set_grad_enabled),
    _Part(torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled),
    _Part(torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    _Part(torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
    _Part(torch._C._autograd._saved_tensors_hooks_get_disabled_error_message, _put_message),
    _Part(ambient.autocast_state, ambient.put_autocast),
    _Part(_autocast_nesting, _put_autocast_nesting),
    _Part(torch._C._dynamo.eval_frame.get_eval_frame_callback, torch._C._dynamo.eval_frame.set_eval_frame),
    _variables(("tracing_context", "compile_context"), _guards._TLS),
    _variables(("_is_fx_tracing_flag",), _symbolic_trace),
    _Part(patches.values_here, patches.put_values_here),
)


def _filters() -> tuple[int, Any, list[Any], Any]:
    filters: Any = warnings.filters
    return id(filters), filters, list(filters), warnings.showwarning


def _put_filters(before: tuple[int, Any, list[Any], Any]) -> None:
    with warnings.catch_warnings():  # leaving it has the interpreter forget what it knows of filters
        pass
    _, filters, items, warnings.showwarning = before
    filters[:] = items
    warnings.filters = filters


def _put_collector(is_on: bool) -> None:
    gc.enable() if is_on else gc.disable()


_OF_PROCESS = (
    _Part(torch.get_default_dtype, torch.set_default_dtype),
    _Part(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _Part(ambient.kernel_choices, ambient.choose_kernels),
    _Part(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda before: torch._C._set_anomaly_enabled(*before),
    ),
    _Part(_filters, _put_filters),
    _Part(gc.isenabled, _put_collector),
)
