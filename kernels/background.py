"""Kernels that are compiled in threads while the rest of a graph is being emitted.

A thread holds Python's lock for a fifth of a compilation; Triton, LLVM and NVIDIA's assembler release it. So
all kernels of a graph, in all the ways to cut them into blocks, are compiled at the same time, and whoever
starts one waits for that one. Kernels whose sources are equal up to names are compiled once in a process.

A kernel that fails to compile here is compiled again where it is started, which raises.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

from aotdist.kernels import triton_seam
from aotdist.kernels.compilation import pointers_of
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.launching import Config, blocks_of

_MOST_THREADS = 32


class Background:
    """Compiles for one kind of GPU.

    Args:
        backend: who made the GPU.
        arch: its generation, as Triton has it.
    """

    def __init__(self, backend: Any, arch: int | str) -> None:
        self._backend = backend
        self._arch = arch
        self._codes = WeakValueDictionary[tuple[Any, ...], Future[Any]]()
        self._launchers = dict[tuple[Any, ...], threading.Lock]()
        self._lock = threading.Lock()

    @classmethod
    def here(cls) -> Background | None:
        """The one for the current GPU, the same for all graphs; None if there is no GPU."""
        return None if triton_seam.current_gpu() is None else _for_target(*triton_seam.target_here())

    def code(
        self, function: Any, emitted: EmittedKernel, way: Config, source: str
    ) -> Callable[[], Any | None]:
        """Start compiling a kernel of known sizes, unless an equal one was.

        Args:
            function: the kernel, of `triton.jit`.
            emitted: the kernel.
            way: how it is cut into blocks.
            source: its source without names, see `tuning.nameless_source`.

        Returns:
            A function that waits for Triton's compiled kernel; it returns None if that failed to compile.
        """
        key = (source, way)
        with self._lock:
            code = self._codes.get(key)
            if code is None:
                pointers, blocks = pointers_of(emitted), blocks_of(emitted.kernel, way)
                task = functools.partial(self._compile, function, pointers, blocks, way.options)
                code = self._codes[key] = _pool().submit(task)
        return functools.partial(_finished, code)

    def _compile(self, function: Any, pointers: Any, blocks: Any, options: Any) -> Any:
        made = triton_seam.compiled(
            function, pointers, {}, blocks, backend=self._backend, arch=self._arch, options=options
        )
        self._build_launcher(made, (*pointers.values(), len(blocks)))
        return made

    def _build_launcher(self, made: Any, signature: tuple[Any, ...]) -> None:
        """Build the launcher of a signature, once: it may be a program in C."""
        with self._lock:
            lock = self._launchers.setdefault(signature, threading.Lock())
        with lock:
            triton_seam.build_launcher(made)


def _finished(code: Future[Any]) -> Any | None:
    return None if code.exception() else code.result()


@functools.cache
def _for_target(backend: Any, arch: int | str) -> Background:
    return Background(backend, arch)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "aotdist compiles")


def _forget() -> None:
    """Forget pending compilations in a forked child: the threads that run them stay in the parent."""
    _pool.cache_clear()
    _for_target.cache_clear()


os.register_at_fork(after_in_child=_forget)
