"""What kernels come to as a GPU runs them: registers, instructions, how wide they read and write."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.kernels.access import VECTOR_BYTES, axes_of, axis_of, reads, vector_length, writes
from aotdist.kernels.compilation import Usage, compiled_for, output_of, usage_of
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.gpus import Target
from aotdist.kernels.index import Index
from aotdist.kernels.polynomial import hint_of

_NVIDIA_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_AMD_INSTRUCTION = re.compile(r"^\t([a-z]\w*)", re.MULTILINE)


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


def _instructions(made: Any, target: Target) -> Mapping[str, int]:
    if target.startswith("sm_"):
        return Counter(_NVIDIA_INSTRUCTION.findall(output_of(made.asm["cubin"], "nvdisasm")))
    return Counter(_AMD_INSTRUCTION.findall(made.asm["amdgcn"]))
