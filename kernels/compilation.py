"""Kernels compiled for GPUs that are not here.

Triton compiles for any target without a driver, so a machine without a GPU can make what one with a GPU
loads, and can read off what it will cost there: registers, what spills, how wide it reads.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.errors import BadSettings
from aotdist.kernels import triton_seam
from aotdist.kernels.access import VECTOR_BYTES, axes_of, axis_of, reads, vector_length, writes
from aotdist.kernels.device_functions import HELPERS
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.gpus import TARGETS as TARGETS
from aotdist.kernels.gpus import Target as Target
from aotdist.kernels.index import Index
from aotdist.kernels.loading import loaded
from aotdist.kernels.polynomial import hint_of
from aotdist.kernels.sized import form_of

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
_NVIDIA_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_AMD_INSTRUCTION = re.compile(r"^\t([a-z]\w*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a thread has.

    Args:
        registers: 32 bits each.
        spilled: bytes that found no register.
    """

    registers: int
    spilled: int


@dataclass(frozen=True, slots=True)
class Binary:
    """A kernel as a GPU runs it.

    Args:
        name: of the kernel, and of its symbol.
        target: what it runs on.
        code: a cubin or an hsaco.
        usage: what a thread has.
        shared: bytes of shared memory of a block.
        instructions: how often each stands in it, by its full name (`LDG.E.128`).
    """

    name: str
    target: Target
    code: bytes
    usage: Usage
    shared: int
    instructions: Mapping[str, int]

    def count(self, *words: str) -> int:
        """How many instructions have all these words in their name: `count("LDG", "128")`."""
        return sum(
            number for name, number in self.instructions.items() if set(words).issubset(name.split("."))
        )


def compile_kernel(emitted: EmittedKernel, target: Target) -> Binary:
    """Compile a kernel; the GPU need not be there.

    Args:
        emitted: by a process that does not interpret: in one that does, its blocks are other ones.
        target: the GPUs to compile for.

    Raises:
        BadSettings: the target is unknown, Triton or its tools are missing, or kernels are interpreted here.
    """
    made = compiled_for(emitted, target)
    code: bytes = made.asm["cubin" if target.startswith("sm_") else "hsaco"]
    usage, shared = usage_of(made, target), made.metadata.shared
    instructions = _instructions(made, target)
    return Binary(emitted.printed.name, target, code, usage, shared, instructions)


def compiled_for(emitted: EmittedKernel, target: Target) -> Any:
    """The same kernel as Triton has it; if its sizes differ from call to call, for those of the traced one.

    Raises:
        BadSettings: as for `compile_kernel`.
    """
    check(target)
    form = form_of(emitted, None)
    name = form.printed.name
    function = loaded(f"{HELPERS}\n\n{form.printed.source}", f"{name} {target}")[name]
    backend, arch = ("cuda", int(target[3:])) if target.startswith("sm_") else ("hip", target)
    return triton_seam.compiled(
        function,
        pointers_of(emitted),
        form.sizes,
        form.constants,
        backend=backend,
        arch=arch,
        options=form.options,
    )


def check(target: str) -> None:
    """See that kernels can be compiled for a target here.

    Raises:
        BadSettings: they can't.
    """
    if target not in TARGETS:
        raise BadSettings(
            f"there is no target {target!r}", stage="codegen", fix=f"name one of {', '.join(TARGETS)}"
        )
    if not triton_seam.is_installed():
        raise BadSettings(
            "kernels are compiled by Triton, which is not installed", stage="codegen", fix="install `triton`"
        )
    if triton_seam.is_interpreting():
        raise BadSettings(
            "this process interprets its kernels, and such ones cannot be compiled",
            stage="codegen",
            fix="compile in a process without TRITON_INTERPRET",
        )
    missing = [tool for tool in ("cuobjdump", "nvdisasm") if not (triton_seam.nvidia_tools() / tool).exists()]
    if target.startswith("sm_") and missing:
        raise BadSettings(
            f"Triton is installed without {' and '.join(missing)}, which read what a kernel costs",
            stage="codegen",
            fix="install `triton` from its wheel",
        )


def pointers_of(emitted: EmittedKernel) -> dict[str, str]:
    """A kernel's tensors in the order of its arguments, with their types as Triton writes them."""
    types = {
        f"{way}_{access.buffer}": _POINTERS[access.stored]
        for member in emitted.members
        for way, accesses in (("in", member.loads()), ("out", member.stores))
        for access in accesses
    }
    return {name: types[name] for name in emitted.printed.tensors}


def num_vectors(emitted: EmittedKernel) -> tuple[int, int]:
    """How often a thread must read and write 16 bytes at once, at least: what lies side by side, by block.

    Returns:
        Loads and stores. A tensor whose block gives a thread less than 16 bytes takes no part.
    """
    return _num_vectors(emitted, reads(emitted.kernel)), _num_vectors(emitted, writes(emitted.kernel))


def _num_vectors(emitted: EmittedKernel, accesses: Iterable[tuple[Index, torch.dtype]]) -> int:
    config, total = emitted.config, 0
    rblock = min(config.rblock, *(hint_of(member.num_reduced) for member in emitted.members))
    for index, dtype in accesses:
        axes, length = axes_of(index), vector_length(emitted.kernel, index, dtype)
        block = (config.xblock if "x" in axes else 1) * (rblock if "r" in axes else 1)
        if axis_of(emitted.kernel, index) in axes and length * dtype.itemsize == VECTOR_BYTES:
            total += block // (32 * config.num_warps * length)
    return total


def usage_of(made: Any, target: Target) -> Usage:
    """What a thread of a compiled kernel has.

    Args:
        made: the kernel as Triton has it.
        target: what it is compiled for.
    """
    if not target.startswith("sm_"):
        text: str = made.asm["amdgcn"]
        return Usage(
            _number(r"\.vgpr_count:\s+(\d+)", text), _number(r"\.private_segment_fixed_size:\s+(\d+)", text)
        )
    usage = _output(made.asm["cubin"], "cuobjdump", "--dump-resource-usage")
    # A stack is where what has no register goes; no kernel of ours calls a function.
    spilled = _number(r"\bSTACK:(\d+)", usage) + _number(r"\bLOCAL:(\d+)", usage)
    return Usage(_number(r"\bREG:(\d+)", usage), spilled)


def _instructions(made: Any, target: Target) -> Mapping[str, int]:
    if target.startswith("sm_"):
        return Counter(_NVIDIA_INSTRUCTION.findall(_output(made.asm["cubin"], "nvdisasm")))
    return Counter(_AMD_INSTRUCTION.findall(made.asm["amdgcn"]))


def _output(cubin: bytes, tool: str, *options: str) -> str:
    """What one of NVIDIA's tools says of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton_seam.nvidia_tools() / tool, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in what the compiler wrote"
    return int(found[1])
