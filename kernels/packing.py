"""Compiled kernels as data, to be kept in a file, and loaded where nothing compiles them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from aotdist.kernels import triton_seam
from aotdist.kernels.compilation import Target, compiled_for, pointers_of, usage_of
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.launching import blocks_of
from aotdist.kernels.running import Loaded, Runner


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
    kept = {key: [] if key == "extern_libs" else value for key, value in json.loads(metadata).items()}
    blocks = blocks_of(emitted.kernel, emitted.config)
    registers = usage_of(made, target).registers
    return Packed(code, json.dumps(kept, sort_keys=True), pointers_of(emitted), blocks, registers)


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
