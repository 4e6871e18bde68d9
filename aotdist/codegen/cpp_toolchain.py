"""Is there a C++ compiler that can build kernels? Found out in a tenth of a second, before any tracing."""

from __future__ import annotations

import ctypes
import functools
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch

from aotdist.errors import BadSettings
from aotdist.torch_seam.inductor import find_cpp_compiler

_PROBE = """
#include <Python.h>
#ifdef _OPENMP
#include <omp.h>
#endif
extern "C" int aotdist_probe() { return 0; }
"""

_FIXES = {
    "Python.h": "install Python's headers (Debian: python3-dev)",
    "omp.h": "install the compiler's OpenMP headers (Debian: libomp-dev for clang)",
}


def check_cpp_toolchain() -> None:
    """Make sure that kernels can be compiled.

    Raises:
        BadSettings: there is no C++ compiler, or it cannot build a Python extension with OpenMP.
    """
    compiler = find_cpp_compiler()
    if compiler is None:
        raise BadSettings(
            "the inductor backend needs a C++ compiler, and neither `g++` nor the one that CXX names runs",
            fix='install one (Debian: apt-get install g++), point CXX at it, or use backend="fx"',
        )
    complaint = None if _builds_vectors(compiler) else _complaint(compiler, ())
    if complaint is not None:
        fixes = [fix for header, fix in _FIXES.items() if header in complaint]
        raise BadSettings(
            f"the C++ compiler `{compiler}` cannot build a Python extension: {complaint}",
            fix=f'{next(iter(fixes), "repair it, or point CXX at another")}, or use backend="fx"',
        )


def vector_isa_is_sound() -> bool:
    """Whether the CPU's vector instructions may be used without Inductor's own probes.

    The probes compile torch's vector headers once per instruction set: 7.0 of the 13.1 s that the
    first graph of a process takes with an empty cache. What can really be missing is a flag of the
    compiler or the maths library for it inside torch; both are looked up here in 0.1 s.
    """
    compiler = find_cpp_compiler()
    return compiler is not None and _builds_vectors(compiler)


@functools.cache
def _builds_vectors(compiler: str) -> bool:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    flags, symbol = _x86_requirements(torch.backends.cpu.get_cpu_capability())
    return bool(flags) and _torch_exports(symbol) and _complaint(compiler, flags) is None


def _x86_requirements(capability: str) -> tuple[tuple[str, ...], str]:
    """Compiler flags for the CPU's vectors, and the vectorised `expf` that torch must bring for them."""
    match capability:
        case "AVX512":
            flags = ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mavx2", "-mf16c")
            return flags, "Sleef_expf16_u10"
        case "AVX2":
            return ("-mavx2", "-mfma", "-mf16c"), "Sleef_expf8_u10"
        case _:
            return (), ""


def _torch_exports(symbol: str) -> bool:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return library.exists() and hasattr(ctypes.CDLL(str(library)), symbol)


@functools.cache
def _complaint(compiler: str, flags: tuple[str, ...]) -> str | None:
    """What the compiler says against a small Python extension; None when it builds."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROBE)
        command = [compiler, str(source), "-c", "-fPIC", *flags, f"-I{sysconfig.get_path('include')}"]
        command += ["-o", str(Path(folder) / "probe.o"), *(["-fopenmp"] if sys.platform == "linux" else [])]
        built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode == 0:
        return None
    lines = [line for line in built.stderr.splitlines() if "error" in line] or built.stderr.splitlines()
    return lines[0] if lines else f"exit status {built.returncode}"
