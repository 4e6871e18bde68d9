"""Many C++ kernels as one translation unit with one Python binding.

Inductor compiles each kernel of a CPU graph on its own, and each such run of the compiler spends
0.46 of its 0.66 s on reading one precompiled header (g++ 12, 155 MB). Together, the 20 kernels of
an 8-layer Llama's step take 1.8 s instead of 13.2. The kernels' own text is kept as it is, but for one thing:
where kernels check indices, one of several threads would raise inside of a parallel loop, which ends the
process (torch 2.13, `torch.compile` too). There each turn of the loop catches, and the kernel raises when
all threads are done.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

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
