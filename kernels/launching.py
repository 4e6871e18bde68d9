"""Launches of kernels: the size of their blocks, the grid, and the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotdist.kernels.access import axes_of, is_wide, reads, writes
from aotdist.kernels.gpus import USUAL, Gpu
from aotdist.kernels.ir import Kernel
from aotdist.kernels.polynomial import Values, hint_of, number_at
from aotdist.kernels.running import Runner

MAX_PERSISTENT = 8192
"""Places along what is reduced that one block may hold: 32 registers a thread and value with 8 warps."""
MAX_PERSISTENT_COLUMN = 128
"""As `MAX_PERSISTENT`, where neighbours lie along the results: a block needs some beside each other."""
MIN_COLUMNS = 16
"""How many of these neighbours: 32 bytes, the least that memory is read by, of 16-bit floating point."""

_BLOCK = 1024
_MANY = 8  # tensors: with 8 elements of each, a thread of more takes over 64 registers
_LOOPED_BLOCK = 2048
_PART_BLOCK = 4096
_COLUMNS_BLOCK = 4096
_FEW_ROWS_BLOCK = 2048
_SHARED = 100 * 2**10  # bytes of shared memory
_MIN_STAGED = 256
_MAX_COLUMNS = 64
_TILE = 64
_INTERPRETED_TILE = 256
_INTERPRETED_BLOCK = 2**17  # the interpreter pays by the block and not by the element


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is cut into blocks.

    Args:
        xblock: results in a block; a power of two.
        rblock: what is reduced at a time; a power of two, 1 in a kernel that reduces nothing.
        num_warps: groups of 32 threads that share a block.
        contracts: whether a product and a sum may be rounded once, as one instruction.
    """

    xblock: int
    rblock: int
    num_warps: int
    contracts: bool = True

    @property
    def options(self) -> dict[str, Any]:
        """Triton's options besides the blocks."""
        return {"num_warps": self.num_warps, "enable_fp_fusion": self.contracts}


def is_persistent(kernel: Kernel, values: Values | None = None) -> bool:
    """Whether one block holds a whole row of the reduction; folding rows requires that.

    Args:
        kernel: which.
        values: of symbols, see `number_at`.
    """
    most = MAX_PERSISTENT_COLUMN if is_wide(kernel) else MAX_PERSISTENT
    return kernel.p is not None or number_at(kernel.num_reduced, values) <= most


def config_of(
    kernel: Kernel,
    *,
    is_interpreted: bool,
    contracts: bool = True,
    gpu: Gpu = USUAL,
    values: Values | None = None,
) -> Config:
    """The blocks of a kernel.

    Args:
        kernel: which.
        is_interpreted: whether it runs in Python.
        contracts: whether a product and a sum may be rounded once.
        gpu: which it is for.
        values: of symbols, see `number_at`. The number of results then does not matter: small ones would get
            blocks, and so compilations, of their own.
    """
    reduced = number_at(kernel.num_reduced, values)
    blocks = _blocks(kernel, reduced, is_persistent(kernel, values), gpu, is_interpreted=is_interpreted)
    return replace(blocks, contracts=contracts)


def _blocks(kernel: Kernel, reduced: int, is_held: bool, gpu: Gpu, *, is_interpreted: bool) -> Config:
    count = kernel.num_in_part
    results = _power_of_two(count) if isinstance(count, int) else _INTERPRETED_BLOCK
    if not kernel.r:
        block = _INTERPRETED_BLOCK if is_interpreted else _pointwise_block(kernel)
        return Config(min(results, block), 1, 4)
    if kernel.is_tiled:
        side = _INTERPRETED_TILE if is_interpreted else _TILE
        return Config(min(results, side), min(_power_of_two(reduced), side), 4)
    rblock = _power_of_two(reduced) if is_held else _LOOPED_BLOCK
    if is_interpreted:
        return Config(max(1, min(results, _INTERPRETED_BLOCK // rblock)), rblock, 4)
    if is_wide(kernel):
        return _column_blocks(kernel, rblock, gpu, is_held=is_held)
    if kernel.p is not None:  # few blocks, which hold sums besides: 16 elements a thread, of many tensors 8
        xblock = max(1, min(results, _PART_BLOCK // rblock))
        is_large = len([*reads(kernel), *writes(kernel)]) > _MANY
        return Config(xblock, rblock, min(16, max(4, xblock * rblock // (256 if is_large else 512))))
    xblock = max(1, min(results, _BLOCK // rblock))
    return Config(xblock, rblock, 8 if xblock * rblock >= 4096 else 4)


def _pointwise_block(kernel: Kernel) -> int:
    """8 elements a thread; 4 in kernels of many tensors, which still make 16 bytes of float32."""
    itemsizes = [dtype.itemsize for _, dtype in (*reads(kernel), *writes(kernel))]
    return _BLOCK // 2 if len(itemsizes) > _MANY and min(itemsizes) >= 4 else _BLOCK


def _column_blocks(kernel: Kernel, rblock: int, gpu: Gpu, *, is_held: bool) -> Config:
    """Blocks as wide along the results as leaves one for every multiprocessor; wider where rows are few."""
    num_results = hint_of(kernel.num_results)
    xblock = min(_power_of_two(num_results), max(_MAX_COLUMNS, _FEW_ROWS_BLOCK // rblock))
    while xblock > MIN_COLUMNS and num_results < xblock * gpu.num_processors:
        xblock //= 2
    if is_held:
        xblock = min(xblock, _COLUMNS_BLOCK // rblock)
    rblock = min(rblock, _COLUMNS_BLOCK // xblock)
    return Config(xblock, rblock, 8 if xblock * rblock >= _COLUMNS_BLOCK else 4)


def _power_of_two(count: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, count - 1).bit_length()


def num_stages_of(kernel: Kernel) -> int:
    """The pipeline depth of a kernel's loop over rows, each iteration of which waits for its sums.

    Loaded rows lie in shared memory until their iteration, with room for two blocks; a loop over short rows
    loads many in one iteration anyway.

    Args:
        kernel: which adds up rows.
    """
    length = hint_of(kernel.num_reduced)
    read = sum(dtype.itemsize for index, dtype in reads(kernel) if axes_of(index) == {"x", "r"})
    bytes_of_turn = max(_PART_BLOCK, _power_of_two(length)) * read
    fitting = (stages for stages in (4, 3) if (stages - 1) * bytes_of_turn <= _SHARED)
    return next(fitting, 1) if length >= _MIN_STAGED else 1


def blocks_of(kernel: Kernel, config: Config) -> dict[str, int]:
    """The last arguments of a kernel: its blocks."""
    return {"XBLOCK": config.xblock} | ({"RBLOCK": config.rblock} if kernel.r else {})


def num_blocks_of(kernel: Kernel, config: Config, values: Values | None = None) -> int:
    """How many blocks run side by side: one for each part, if there are some.

    Args:
        kernel: which.
        config: its blocks.
        values: of symbols, see `number_at`.
    """
    if kernel.p is not None:
        return number_at(kernel.p.size, values)
    num_columns = -(-number_at(kernel.num_reduced, values) // config.rblock) if kernel.is_tiled else 1
    return -(-number_at(kernel.num_results, values) // config.xblock) * num_columns


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a kernel writes.

    Args:
        sizes: its sizes.
        strides: its strides.
        dtype: of its elements.
        into: position of the input that it overwrites; None for memory of its own.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    into: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Runs a kernel on tensors, and returns what it wrote: a tensor, or a tuple of several.

    Args:
        name: of the kernel.
        runner: starts it.
        results: what it writes.
        device: where.
    """

    name: str
    runner: Runner
    results: Sequence[Result]
    device: torch.device

    @property
    def __name__(self) -> str:
        """What it is called where it is printed."""
        return self.name

    @property
    def registers(self) -> int | None:
        """Of a thread; None before it is known."""
        return self.runner.registers

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Launch it on its inputs."""
        written = tuple(
            torch.empty_strided(result.sizes, result.strides, dtype=result.dtype, device=self.device)
            if result.into is None
            else inputs[result.into]
            for result in self.results
        )
        if self.runner.num_blocks:
            pairs = zip(written, self.results, strict=True)
            own = [tensor for tensor, result in pairs if result.into is None]
            self.runner(inputs, own)
        return written[0] if len(written) == 1 else written
