"""The C++ kernels of one generated module, compiled together and in the background."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from aotdist.codegen.cpp_units import CppKernel, entry_name, unit_source
from aotdist.torch_seam.inductor import compile_threads, load_cpp_kernel, submit_cpp_module

KERNELS_PER_UNIT = 8
"""A unit costs 0.46 s and each kernel in it 0.065 s: eight keep the fixed half from dominating."""


class PendingKernel:
    """Stands among a generated module's globals for a kernel that is still being compiled."""

    __slots__ = ("_batch", "kernel", "ready")

    def __init__(self, batch: KernelBatch, kernel: CppKernel) -> None:
        self._batch = batch
        self.kernel = kernel
        self.ready: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Wait for the kernel and run it."""
        self._batch.finish()
        return cast("Callable[..., Any]", self.ready)(*args)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Kernels that one run of the compiler builds; `load` waits for it."""

    members: Sequence[PendingKernel]
    load: Callable[[], ModuleType]


class KernelUnits:
    """Shares kernels out to runs of the compiler."""

    def __init__(self) -> None:
        self._waiting: list[PendingKernel] = []
        self._units: list[_Unit] = []
        self._lock = threading.Lock()

    def add(self, members: Sequence[PendingKernel]) -> None:
        """Kernels that the next `start` compiles."""
        self._waiting += members

    def start(self) -> None:
        """Start compiling."""
        for members in _balanced(self._waiting, compile_threads()):
            source = unit_source([pending.kernel for pending in members])
            self._units.append(_Unit(members, submit_cpp_module(source)))
        self._waiting = []

    def finish(self) -> None:
        """Wait for the compiler. Idempotent, and safe from any thread."""
        with self._lock:
            self.start()
            while self._units:
                _resolve(self._units[-1])
                self._units.pop()


class KernelBatch:
    """Collects a module's kernels, and puts them in their places once they are compiled.

    Args:
        together: what starts the compiler later, for several modules; without it, `submit` does.
    """

    def __init__(self, together: KernelUnits | None = None) -> None:
        self._members: list[PendingKernel] = []
        self._units = together or KernelUnits()
        self._starts = together is None
        self._scope: dict[str, Any] = {}

    def add(self, argtypes: Sequence[str], source: str) -> PendingKernel | None:
        """A stand-in for a kernel that is compiled after `submit`; None if it cannot share a unit."""
        kernel = CppKernel(tuple(argtypes), source)
        if not kernel.mergeable:
            return None
        pending = PendingKernel(self, kernel)
        self._members.append(pending)
        return pending

    def submit(self, scope: dict[str, Any]) -> None:
        """All kernels are there; `scope` is the globals that hold the stand-ins."""
        self._scope = scope
        self._units.add(self._members)
        self._members = []
        if self._starts:
            self._units.start()

    def finish(self) -> None:
        """Wait for the compiler and replace every stand-in. Idempotent, and safe from any thread."""
        self._units.finish()
        for name, value in self._scope.items():
            if isinstance(value, PendingKernel) and value.ready is not None:
                self._scope[name] = value.ready
        self._scope = {}


def _resolve(unit: _Unit) -> None:
    try:
        module = unit.load()
    except Exception:  # Kernels that do not get on in one unit may do so apart; if not, that error is raised.
        for pending in unit.members:
            pending.ready = load_cpp_kernel(pending.kernel.argtypes, pending.kernel.source)
        return
    for position, pending in enumerate(unit.members):
        pending.ready = getattr(module, entry_name(position))


def _balanced(members: Sequence[PendingKernel], threads: int) -> list[list[PendingKernel]]:
    """At most `threads` groups of about equal text, none much smaller than `KERNELS_PER_UNIT`."""
    num_groups = min(threads, math.ceil(len(members) / KERNELS_PER_UNIT))
    groups: list[list[PendingKernel]] = [[] for _ in range(num_groups)]
    weights = [0] * num_groups
    for pending in sorted(members, key=lambda pending: -len(pending.kernel.source)):
        lightest = weights.index(min(weights))
        groups[lightest].append(pending)
        weights[lightest] += len(pending.kernel.source)
    return groups


class KernelBatches:
    """The batches of everything that one compilation generates or loads."""

    def __init__(self) -> None:
        self._batches: list[KernelBatch] = []
        self._together = _TOGETHER.get()

    def start(self) -> KernelBatch:
        """A batch for one more module."""
        self._batches.append(KernelBatch(self._together))
        return self._batches[-1]

    def finish(self) -> None:
        """Wait for every batch."""
        for batch in self._batches:
            batch.finish()


_TOGETHER = ContextVar[KernelUnits | None]("kernels_together", default=None)


@contextmanager
def kernels_together() -> Generator[None]:
    """Compilations meanwhile share runs of the compiler, which start at the end.

    The regions of a Llama's forward have one to six kernels each, and a run costs as much as seven.
    """
    units = KernelUnits()
    token = _TOGETHER.set(units)
    try:
        yield
    finally:
        _TOGETHER.reset(token)
    units.start()
