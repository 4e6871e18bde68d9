"""What a compiler's output depends on besides the graph: versions, the machine, settings of the process."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from aotdist.artifacts.archive import version_of
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.ambient import fills_uninitialized_memory, kernel_choices
from aotdist.torch_seam.inductor import inductor_extensions, inductor_options
from aotdist.torch_seam.operators import OpOverload

_VARIABLES = ("CXX", "CPATH", "CPLUS_INCLUDE_PATH", "OMP_NUM_THREADS", "CONDA_PREFIX")
"""Environment variables that a C++ compiler, or Inductor when it calls one, looks at."""


@functools.cache
def machine() -> Mapping[str, str]:
    """What stays the same while a process runs, by what it is called."""
    return {
        "aotdist": _our_code(),
        "python": sys.version,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "triton": version_of("triton"),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": f"{torch.backends.cpu.get_cpu_capability()} {_instructions()}",
        "compiler": _compiler(),
    }


def process() -> Mapping[str, str]:
    """What a program may change at any time.

    Raises:
        UnsupportedProgram: Inductor was given functions of the user's.
    """
    options = inductor_options()
    foreign = sorted(name for name, value in options.items() if _is_function(value))
    if foreign:
        raise UnsupportedProgram(f"Inductor runs functions of yours: {', '.join(foreign)}", stage="cache")
    return {
        **{name: os.environ.get(name, "") for name in _VARIABLES},
        "threads": str(torch.get_num_threads()),
        "deterministic": f"{torch.are_deterministic_algorithms_enabled()} {fills_uninitialized_memory()}",
        "kernels": str(kernel_choices()),
        "defaults": f"{torch.get_default_dtype()} {torch.get_default_device()}",
        "inference": str(torch.is_inference_mode_enabled()),
        "matrix products": torch.get_float32_matmul_precision(),
        "inductor": hashlib.sha256(repr(sorted(options.items())).encode()).hexdigest(),
    }


def refuse_foreign_lowerings(operators: frozenset[OpOverload]) -> None:
    """See that Inductor's own functions lower a graph.

    Args:
        operators: that the graph calls.

    Raises:
        UnsupportedProgram: others registered some, for these operators or for PyTorch's own.
    """
    for operator, function in inductor_extensions():
        if _is_of_torch(function):
            continue
        name = str(operator)
        if operator in operators or name.startswith(("aten.", "prims.", "aten::", "prims::")):
            raise UnsupportedProgram(f"`{name}` is lowered by a function of yours", stage="cache")


def _is_function(value: Any) -> bool:
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_is_function, value))
    if isinstance(value, dict):
        return any(map(_is_function, value.values()))
    return callable(value) or " at 0x" in repr(value)


def _is_of_torch(function: Callable[..., Any] | functools.partial[Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    module = str(getattr(function, "__module__", None) or type(function).__module__)
    return module.partition(".")[0] in ("torch", "builtins", "_operator", "math")


def _our_code() -> str:
    """A hash of our own source: while aotdist is worked on, its version stays the same."""
    digest = hashlib.sha256()
    for path in own_files():
        digest.update(f"{path.relative_to(_PACKAGE)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


_PACKAGE = Path(__file__).resolve().parents[2]


def own_files() -> list[Path]:
    """The files of the package `aotdist`, all rooms."""
    return sorted(_python_files(_PACKAGE))


def _python_files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():  # some folders are links, which `rglob` does not follow
        if path.is_dir():
            yield from _python_files(path)
        elif path.suffix == ".py":
            yield path


def _instructions() -> str:
    """Of the processor, as far as the system tells: kernels are compiled for this one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    told = sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _compiler() -> str:
    """The C++ compiler as a file; asking for its version would start it."""
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        return ""
    path = Path(found).resolve()
    known = path.stat()
    return json.dumps([str(path), known.st_size, known.st_mtime_ns])
