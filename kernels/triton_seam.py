"""All use of Triton, 3.6 to 3.9, which is imported when the first kernel is made.

On a GPU kernels are compiled. With `TRITON_INTERPRET=1` in the environment before Triton is first imported,
they run on CPU tensors, block by block in NumPy: slow, and what the tests hold kernels to. Triton's own
interpreter computes bfloat16 and float8 on their raw bits; `repair` has it round as a GPU does.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import linecache
import statistics
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from aotdist.kernels import triton_seam

_ROUNDS = 7
"""How often each way to cut a kernel is measured."""


def is_installed() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def is_interpreting() -> bool:
    """Whether kernels run on CPU tensors."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


def namespace() -> dict[str, Any]:
    """The globals of the source of kernels."""
    import triton
    import triton.language as tl

    if is_interpreting():
        from aotdist.kernels.interpreter import repair

        repair()
    return {"triton": triton, "tl": tl}


def compiled(
    function: Any,
    pointers: Mapping[str, str],
    sizes: Mapping[str, int],
    constants: Mapping[str, int],
    *,
    backend: Literal["cuda", "hip"],
    arch: int | str,
    options: Mapping[str, Any],
) -> Any:
    """A kernel compiled for a GPU that need not be there; no driver is asked.

    Args:
        function: the kernel, of `triton.jit` in a process that does not interpret.
        pointers: its tensors in the order of its arguments, with their types (`*fp32`); all of them lie at
            multiples of 16 bytes, as what PyTorch allocates does.
        sizes: its next arguments, whole numbers. The kernel is specialized on whether 16 divides each,
            whether 32 bits hold it, and whether it is 1.
        constants: its last arguments.
        backend: who made the GPU.
        arch: its generation: 90 for `sm_90`, or `gfx942`.
        options: of Triton's.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = {name: size for name, size in sizes.items() if size == 1} | dict(constants)
    widths = {name: "i64" if size >= 2**31 else "i32" for name, size in sizes.items()}
    signature = dict(pointers) | widths | dict.fromkeys(constants, "constexpr")
    places = {name: (at,) for at, name in enumerate(signature)}
    aligned = [*pointers, *(name for name, size in sizes.items() if size % 16 == 0)]
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={places[name]: value for name, value in constants.items()},
        attrs={places[name]: [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget(backend, arch, 32 if backend == "cuda" else 64)
    return triton.compile(source, target=target, options=dict(options))


def target_here() -> tuple[Any, int | str]:
    """Who made the current GPU, and its generation; see `compiled`."""
    from triton.runtime import driver

    active: Any = driver.active
    target = active.get_current_target()
    return target.backend, target.arch


def build_launcher(kernel: Any) -> None:
    """Build a compiled kernel's launcher into Triton's cache: 3.6 compiles one in C for each signature."""
    from triton.runtime import driver

    active: Any = driver.active
    active.launcher_cls(kernel.src, kernel.metadata)


def code_and_metadata(kernel: Any) -> tuple[bytes, str]:
    """The machine code of a compiled kernel, and Triton's metadata as JSON."""
    (metadata,) = (Path(path) for name, path in kernel.metadata_group.items() if name.endswith(".json"))
    return kernel.kernel, metadata.read_text()


@dataclass(frozen=True, slots=True)
class _Source:
    """What Triton's launcher asks of the source of a kernel.

    Args:
        signature: its arguments and their types.
        constants: the values of those that are constants, by place.
    """

    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], int]


def loaded_kernel(code: bytes, metadata: str, pointers: Mapping[str, str], blocks: Mapping[str, int]) -> Any:
    """A compiled kernel from its parts, see `compiled`; the code is put on the GPU when it is first run.

    Triton 3.6 builds a launcher in C for each signature that is new to the machine; 3.9 has one for all.
    """
    from triton.compiler import CompiledKernel

    name, target = json.loads(metadata)["name"], json.loads(metadata)["target"]
    binary = "cubin" if target["backend"] == "cuda" else "hsaco"
    signature = dict(pointers) | dict.fromkeys(blocks, "constexpr")
    places = {name: (at,) for at, name in enumerate(signature)}
    source = _Source(signature, {places[name]: value for name, value in blocks.items()})
    with tempfile.TemporaryDirectory() as folder:
        files = {
            f"{name}.json": Path(folder, f"{name}.json"),
            f"{name}.{binary}": Path(folder, f"{name}.{binary}"),
        }
        files[f"{name}.json"].write_text(metadata)
        files[f"{name}.{binary}"].write_bytes(code)
        return CompiledKernel(source, files, hashlib.sha256(code).hexdigest())


@dataclass(frozen=True, slots=True)
class Process:
    """The functions and settings of Triton's driver that launches need.

    Args:
        current_device: returns its number.
        current_stream: returns that of a device.
        settings: Triton's settings of launches.
    """

    current_device: Callable[[], int]
    current_stream: Callable[[int], int]
    settings: Any

    @classmethod
    def here(cls) -> Process:
        """This process, which has a GPU."""
        from triton import knobs
        from triton.runtime import driver

        active: Any = driver.active
        return cls(active.get_current_device, active.get_current_stream, knobs.runtime)

    def is_watched(self) -> bool:
        """Whether hooks of a profiler have to be called for launches."""
        first, last = self.settings.launch_enter_hook, self.settings.launch_exit_hook
        return bool(getattr(first, "calls", first)) or bool(getattr(last, "calls", last))


def seconds_of(start: Callable[[], object]) -> float:
    """The median of what a GPU needs for something, its cache emptied each time.

    Args:
        start: starts it.
    """
    from triton.testing import do_bench

    milliseconds: Any = do_bench(start, warmup=2, rep=10, return_mode="median")
    return milliseconds / 1e3


def seconds_of_few(start: Callable[[], object]) -> float:
    """As `seconds_of`, from few rounds (a millisecond in all), to choose among configurations.

    Args:
        start: starts it.
    """
    from triton.runtime import driver

    active: Any = driver.active
    cache = active.get_empty_cache_for_benchmark()
    start()  # puts it on the GPU
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_ROUNDS)]
    for before, after in events:
        active.clear_cache(cache)
        before.record()
        start()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events) / 1e3


def too_large() -> type[Exception]:
    """Triton's error for blocks that exceed a GPU's resources."""
    from triton.runtime.errors import OutOfResources

    return OutOfResources


def gpu_and_version() -> tuple[str, str]:
    """The GPU that is current, and Triton's version: what the speed of a kernel depends on."""
    import triton

    return torch.cuda.get_device_name(), triton.__version__


def current_gpu() -> int | None:
    """The number of the GPU that is current; None where there is none, or kernels are interpreted."""
    return None if is_interpreting() or not torch.cuda.is_available() else torch.cuda.current_device()


def properties_of(device: int) -> Mapping[str, int]:
    """What a GPU's driver says: `multiprocessor_count`, `mem_clock_rate` in kHz, `mem_bus_width` in bits."""
    from triton.runtime import driver

    active: Any = driver.active
    return active.utils.get_device_properties(device)


def is_recording() -> bool:
    """Whether a CUDA graph is being recorded."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def nvidia_tools() -> Path:
    """The folder with NVIDIA's tools that Triton brings."""
    import triton

    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


_serial = itertools.count()


def loaded(source: str, label: str) -> Mapping[str, Any]:
    """The functions of a module of kernels.

    Args:
        source: the module.
        label: a word for the file name that tracebacks show.
    """
    filename = f"<aotdist {label} kernels {next(_serial)}>"
    # Triton reads the source of a function through `linecache`, and an mtime of None keeps it there.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = triton_seam.namespace() | {"__name__": filename}  # Triton asks functions for their module
    exec(compile(source, filename, "exec"), namespace)
    weakref.finalize(namespace["product"], linecache.cache.pop, filename, None)  # gone with the rest
    return namespace
