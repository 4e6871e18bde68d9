"""The C++ kernels of one generated module: one translation unit with one binding, compiled in the background.

Inductor compiles each kernel of a CPU graph on its own, and each such run of the compiler spends
0.46 of its 0.66 s on reading one precompiled header (g++ 12, 155 MB). Together, the 20 kernels of
an 8-layer Llama's step take 1.8 s instead of 13.2. The kernels' own text is kept as it is, but for one thing:
where kernels check indices, one of several threads would raise inside of a parallel loop, which ends the
process (torch 2.13, `torch.compile` too). There each turn of the loop catches, and the kernel raises when
all threads are done.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from aotdist.torch_seam.inductor import compile_threads, load_cpp_kernel, submit_cpp_module

_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"][^\n]*$", re.MULTILINE)
_LOOP = re.compile(r"#pragma omp for(?:.*? collapse\((\d+)\))?")
_ENTRY = re.compile(r'extern\s+"C"\s+void\s+kernel\s*\(')


@dataclass(frozen=True, slots=True)
class CppKernel:
    """One kernel as Inductor writes it.

    Args:
        argtypes: C++ types of its arguments, e.g. `const float*`.
        source: text that includes what it needs and defines `extern "C" void kernel(...)`.
    """

    argtypes: tuple[str, ...]
    source: str

    @property
    def mergeable(self) -> bool:
        """Whether the text has the one entry point that can be renamed."""
        return len(_ENTRY.findall(self.source)) == 1


def entry_name(position: int) -> str:
    """What the kernel at `position` of a unit is called in the unit's Python module."""
    return f"kernel_{position}"


def unit_source(kernels: Sequence[CppKernel]) -> str:
    """A Python extension module `kernel` that holds every kernel under its `entry_name`.

    Each kernel gets a namespace, so that helpers of the same name stay apart.
    """
    includes = dict.fromkeys(line.strip() for kernel in kernels for line in _INCLUDE.findall(kernel.source))
    bodies = (_body(position, kernel) for position, kernel in enumerate(kernels))
    bindings = (_binding(position, kernel) for position, kernel in enumerate(kernels))
    methods = "\n".join(
        f'    {{"{entry_name(position)}", as_method(call_{position}), METH_FASTCALL, ""}},'
        for position in range(len(kernels))
    )
    module = _MODULE.replace("@METHODS@", methods)
    return "\n".join((*includes, _LOOP_FAILURE, *bodies, _PRELUDE, *bindings, module))


def _body(position: int, kernel: CppKernel) -> str:
    text = _INCLUDE.sub("", kernel.source)
    if "index out of bounds" in text:
        text = _catching(text)
    text = _ENTRY.sub(f"static void {entry_name(position)}(", text)
    return f"namespace unit_{position} {{\n{text}\n}}  // namespace unit_{position}\n"


def _catching(text: str) -> str:
    """A kernel whose parallel loops hold what they raise until the end."""
    for loop in reversed(list(_LOOP.finditer(text))):
        begin = loop.end()
        for _ in range(int(loop[1] or 1)):
            begin = text.index("{", begin) + 1
        end = _closing(text, begin)
        text = (
            f"{text[: begin - 1]}try {{{text[begin:end]}}} catch (...) {{ failure.keep(); }}{text[end + 1 :]}"
        )
    entry = _ENTRY.search(text)
    assert entry is not None, "a mergeable kernel has one"
    begin = text.index("{", entry.end()) + 1
    end = _closing(text, begin)
    return f"{text[:begin]}LoopFailure failure;{text[begin:end]}failure.rethrow();{text[end:]}"


def _closing(text: str, begin: int) -> int:
    """Where the block ends that begins before a position."""
    depth = 1
    for brace in re.compile("[{}]").finditer(text, begin):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    raise AssertionError("a block without an end")


def _binding(position: int, kernel: CppKernel) -> str:
    types = [argtype.replace("const ", "") for argtype in kernel.argtypes]
    reads = "\n".join(f"        const auto a{n} = read<{type_}>(args[{n}]);" for n, type_ in enumerate(types))
    return (
        _BINDING.replace("@POSITION@", str(position))
        .replace("@ARITY@", str(len(types)))
        .replace("@READS@", reads)
        .replace("@ARGUMENTS@", ", ".join(f"a{n}" for n in range(len(types))))
    )


_LOOP_FAILURE = r"""
#include <atomic>
#include <exception>

// What the first of several threads raises in a parallel loop.
struct LoopFailure {
    std::exception_ptr first;
    std::atomic_flag taken;
    void keep() { if (!taken.test_and_set()) first = std::current_exception(); }
    void rethrow() const { if (first) std::rethrow_exception(first); }
};
"""

# The address of torch's own `PyObject* -> data_ptr` comes through the environment, as it does for
# Inductor's bindings: including torch's headers for it would cost 2 s a unit.
_PRELUDE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cerrno>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <type_traits>

static void* (*tensor_data_ptr)(PyObject* tensor);

template <typename T>
static inline T read(PyObject* value) {
    if constexpr (std::is_pointer_v<T>) {
        return static_cast<T>(tensor_data_ptr(value));
    } else if constexpr (std::is_floating_point_v<T>) {
        const double number = PyFloat_AsDouble(value);
        if (number == -1.0 && PyErr_Occurred()) [[unlikely]]
            throw std::runtime_error("expected a float argument");
        return static_cast<T>(number);
    } else if constexpr (std::is_same_v<T, uintptr_t>) {
        void* address = PyLong_AsVoidPtr(value);
        if (address == nullptr && PyErr_Occurred()) [[unlikely]]
            throw std::runtime_error("expected an address argument");
        return reinterpret_cast<uintptr_t>(address);
    } else {
        static_assert(std::is_integral_v<T>, "kernel arguments are pointers or numbers");
        const long long number = PyLong_AsLongLong(value);
        if (number == -1 && PyErr_Occurred()) [[unlikely]]
            throw std::runtime_error("expected an int argument");
        return static_cast<T>(number);
    }
}

// Other Python threads (data loading, collectives) run while a kernel does.
struct WithoutGil {
    PyThreadState* state = PyEval_SaveThread();
    ~WithoutGil() { PyEval_RestoreThread(state); }
};

using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);

static PyCFunction as_method(FastCall function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

static PyObject* raised(const char* what) {
    PyErr_SetString(PyExc_RuntimeError, what);
    return nullptr;
}
"""

_BINDING = r"""
static PyObject* call_@POSITION@(PyObject*, PyObject* const* args, Py_ssize_t count) {
    try {
        if (count != @ARITY@) [[unlikely]]
            throw std::runtime_error("kernel_@POSITION@ takes @ARITY@ arguments");
@READS@
        {
            WithoutGil released;
            unit_@POSITION@::kernel_@POSITION@(@ARGUMENTS@);
        }
        Py_RETURN_NONE;
    } catch (const std::exception& error) {
        return raised(error.what());
    } catch (...) {
        return raised("unhandled error in a compiled kernel");
    }
}
"""

_MODULE = r"""
static PyMethodDef methods[] = {
@METHODS@
    {nullptr, nullptr, 0, nullptr}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernel", nullptr, -1, methods};

PyMODINIT_FUNC PyInit_kernel(void) {
    const char* text = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
    errno = 0;
    char* end = nullptr;
    const unsigned long long address = text == nullptr ? 0 : std::strtoull(text, &end, 10);
    if (errno != 0 || end == text || address == 0)
        return raised("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR must hold an address");
    tensor_data_ptr = reinterpret_cast<decltype(tensor_data_ptr)>(address);
    return PyModule_Create(&definition);
}
"""


KERNELS_PER_UNIT = 8
"""A unit costs 0.46 s and each kernel in it 0.065 s: eight keep the fixed half from dominating."""


class PendingKernel:
    """A placeholder in a generated module's globals for a kernel that is still being compiled."""

    __slots__ = ("_batch", "kernel", "ready")

    def __init__(self, batch: KernelBatch, kernel: CppKernel) -> None:
        self._batch = batch
        self.kernel = kernel
        self.ready: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Wait for the kernel and run it."""
        self._batch.finish()
        return cast("Callable[..., Any]", self.ready)(*args)


class KernelBatch:
    """Collects the kernels of the modules that compilations generate or load, and compiles them together.

    A compilation has a batch of its own, or inside `kernels_together` that of all compilations there.
    """

    def __init__(self) -> None:
        self._waiting: list[PendingKernel] = []
        self._units: list[tuple[Sequence[PendingKernel], Callable[[], ModuleType]]] = []
        self._scopes: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    @classmethod
    def here(cls) -> KernelBatch:
        """The batch for a compilation that begins now."""
        return _TOGETHER.get() or cls()

    def add(self, argtypes: Sequence[str], source: str) -> PendingKernel | None:
        """A stand-in for a kernel that is compiled after `submit`; None if it cannot share a unit."""
        kernel = CppKernel(tuple(argtypes), source)
        if not kernel.mergeable:
            return None
        self._waiting.append(PendingKernel(self, kernel))
        return self._waiting[-1]

    def submit(self, scope: dict[str, Any]) -> None:
        """A module is complete; `scope` is its globals, which hold the stand-ins."""
        self._scopes.append(scope)
        if _TOGETHER.get() is not self:
            self.start()

    def start(self) -> None:
        """Start compiling."""
        if not self._waiting:
            return  # asking how many compilers there may be imports half of Inductor: 0.15 s
        for members in _balanced(self._waiting, compile_threads()):
            source = unit_source([pending.kernel for pending in members])
            self._units.append((members, submit_cpp_module(source)))
        self._waiting = []

    def finish(self) -> None:
        """Wait for the compiler and replace every stand-in. Idempotent, and safe from any thread."""
        with self._lock:
            self.start()
            while self._units:
                _resolve(*self._units[-1])
                self._units.pop()
            for scope in self._scopes:
                for name, value in scope.items():
                    if isinstance(value, PendingKernel) and value.ready is not None:
                        scope[name] = value.ready
            self._scopes = []


def _resolve(members: Sequence[PendingKernel], load: Callable[[], ModuleType]) -> None:
    """Wait for the kernels of one run of the compiler."""
    try:
        module = load()
    except Exception:  # Kernels that do not get on in one unit may do so apart; if not, that error is raised.
        for pending in members:
            pending.ready = load_cpp_kernel(pending.kernel.argtypes, pending.kernel.source)
        return
    for position, pending in enumerate(members):
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


_TOGETHER = ContextVar[KernelBatch | None]("kernels_together", default=None)


@contextmanager
def kernels_together() -> Generator[None]:
    """Compilations inside share runs of the compiler, which start at the end of the block.

    The regions of a Llama's forward have one to six kernels each, and a run costs as much as seven.
    """
    batch = KernelBatch()
    token = _TOGETHER.set(batch)
    try:
        yield
    finally:
        _TOGETHER.reset(token)
    batch.start()
