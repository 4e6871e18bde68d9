"""Kernels as something to call: how large their blocks are, how many run, and where their results go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.kernels.ir import Kernel

MAX_PERSISTENT = 8192
"""Places along what is reduced that one block may hold: 32 registers a thread and value with 8 warps."""

_BLOCK = 1024
_LOOPED_BLOCK = 2048
_INTERPRETED_BLOCK = 2**17  # the interpreter pays by the block and not by the element


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is cut into blocks.

    Args:
        xblock: results in a block; a power of two.
        rblock: what is reduced at a time; a power of two, 1 in a kernel that reduces nothing.
        num_warps: groups of 32 threads that share a block.
    """

    xblock: int
    rblock: int
    num_warps: int


def is_persistent(kernel: Kernel) -> bool:
    """Whether all that a kernel reduces is held in one block."""
    return kernel.num_reduced <= MAX_PERSISTENT


def config_of(kernel: Kernel, *, is_interpreted: bool) -> Config:
    """The blocks of a kernel."""
    results = _power_of_two(kernel.num_results)
    if not kernel.r:
        block = min(results, _INTERPRETED_BLOCK if is_interpreted else _BLOCK)
        return Config(block, 1, 4)
    rblock = _power_of_two(kernel.num_reduced) if is_persistent(kernel) else _LOOPED_BLOCK
    if is_interpreted:
        return Config(max(1, min(results, _INTERPRETED_BLOCK // rblock)), rblock, 4)
    xblock = max(1, min(results, _BLOCK // rblock))
    return Config(xblock, rblock, 8 if xblock * rblock >= 4096 else 4)


def _power_of_two(count: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, count - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a kernel writes."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Runs a kernel on tensors, and returns what it wrote: a tensor, or a tuple of several.

    Args:
        name: of the kernel.
        function: the kernel, of `triton.jit`.
        num_blocks: how many run; none for results without elements.
        blocks: `XBLOCK`, `RBLOCK`.
        num_warps: threads of a block, in groups of 32.
        results: what it writes.
        device: where.
    """

    name: str
    function: Any
    num_blocks: int
    blocks: Mapping[str, int]
    num_warps: int
    results: Sequence[Result]
    device: torch.device

    @property
    def __name__(self) -> str:
        """What it is called where it is printed."""
        return self.name

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Launch it on what it reads."""
        written = tuple(
            torch.empty_strided(result.sizes, result.strides, dtype=result.dtype, device=self.device)
            for result in self.results
        )
        if self.num_blocks:
            self.function[(self.num_blocks,)](*inputs, *written, **self.blocks, num_warps=self.num_warps)
        return written[0] if len(written) == 1 else written


def launch_of(
    kernel: Kernel,
    function: Callable[..., Any],
    config: Config,
    results: Sequence[Result],
    device: torch.device,
) -> Launch:
    """What runs `kernel`, compiled as `function`."""
    blocks = {"XBLOCK": config.xblock} | ({"RBLOCK": config.rblock} if kernel.r else {})
    num_blocks = -(-kernel.num_results // config.xblock)
    return Launch(kernel.name, function, num_blocks, blocks, config.num_warps, tuple(results), device)
