"""Kernels compiled for GPUs that are not here, as data that can be kept in a file.

Triton compiles for any target without a driver, so a machine without a GPU can make what one with a GPU
loads, and can read off what it will cost there: registers, and what spills.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.errors import BadSettings
from aotdist.kernels import triton_seam
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.gpus import TARGETS, Target
from aotdist.kernels.launching import blocks_of
from aotdist.kernels.running import Loaded, Runner
from aotdist.kernels.sized import form_of
from aotdist.kernels.spelling import HELPERS
from aotdist.kernels.triton_seam import loaded

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


@dataclass(frozen=True, slots=True)
class Usage:
    """What a thread has.

    Args:
        registers: 32 bits each.
        spilled: bytes that found no register.
    """

    registers: int
    spilled: int


def compiled_for(emitted: EmittedKernel, target: Target) -> Any:
    """The kernel as Triton compiles it; symbolic sizes are those of the traced call.

    Raises:
        BadSettings: the target is unknown, Triton or its tools are missing, or kernels are interpreted here.
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
    usage = output_of(made.asm["cubin"], "cuobjdump", "--dump-resource-usage")
    # A stack is where what has no register goes; no kernel of ours calls a function.
    spilled = _number(r"\bSTACK:(\d+)", usage) + _number(r"\bLOCAL:(\d+)", usage)
    return Usage(_number(r"\bREG:(\d+)", usage), spilled)


def output_of(cubin: bytes, tool: str, *options: str) -> str:
    """What one of NVIDIA's tools says of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton_seam.nvidia_tools() / tool, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match, f"{pattern} is not in what the compiler wrote"
    return int(match[1])


@dataclass(frozen=True, slots=True)
class Packed:
    """A kernel as a GPU runs it, and what Triton has to know to start it.

    Args:
        code: a cubin or an hsaco.
        metadata: what Triton's compiler says of it, as JSON.
        pointers: its tensors in the order of its arguments, with their types as Triton writes them.
        blocks: its last arguments, which are constants.
        registers: of a thread, 32 bits each.
    """

    code: bytes
    metadata: str
    pointers: Mapping[str, str]
    blocks: Mapping[str, int]
    registers: int


def pack(emitted: EmittedKernel, target: Target) -> Packed:
    """Compile a kernel for a GPU that need not be there.

    Raises:
        BadSettings: the target is unknown, or kernels cannot be compiled here.
    """
    made = compiled_for(emitted, target)
    code, metadata = triton_seam.code_and_metadata(made)
    # Where the compiler found NVIDIA's and AMD's libraries, which are in the code by now.
    fields = {key: [] if key == "extern_libs" else value for key, value in json.loads(metadata).items()}
    blocks = blocks_of(emitted.kernel, emitted.config)
    registers = usage_of(made, target).registers
    return Packed(code, json.dumps(fields, sort_keys=True), pointers_of(emitted), blocks, registers)


def unpack(packed: Packed, num_blocks: int, device: torch.device, overwritten: frozenset[int]) -> Runner:
    """What starts the kernel; its code is loaded when it is first started.

    Args:
        packed: the kernel.
        num_blocks: how many blocks run.
        device: where it runs.
        overwritten: positions of the inputs that it writes.
    """
    kernel = triton_seam.loaded_kernel(packed.code, packed.metadata, packed.pointers, packed.blocks)
    return Loaded(kernel, num_blocks, tuple(packed.blocks.values()), device, overwritten)
