"""How long a kernel takes, by a model of memory traffic, and which configurations are worth measuring.

A GPU reaches its memory bandwidth only with enough bytes in flight: bandwidth times latency, 20 KB for each
multiprocessor. In flight are the loads of the resident blocks, whose number follows from their threads and
registers. A block ends after its loads, some of which depend on others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from aotdist.kernels.access import axes_of, is_wide, reads, writes
from aotdist.kernels.accumulation import num_lanes
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.ir import Kernel, Load, Reduce
from aotdist.kernels.launching import MIN_COLUMNS, Config, is_persistent
from aotdist.kernels.polynomial import hint_of

_LATENCY = 0.6e-6  # seconds from a load to its value, when memory is busy
_REGISTERS = 2**16  # of a multiprocessor, 32 bits each
_MAX_REGISTERS = 255  # of a thread
_SURE = 0.7  # of them: the estimate is some 30% too low at times
_THREADS = 2048
_BLOCKS = 32
_OWN_REGISTERS = 24  # of a thread, for addresses and places
_GUARDS = 4  # of loads, in a register
_EXCHANGE = 0.1e-6  # seconds that the warps of a block need to reduce what each has


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a configuration costs.

    Args:
        seconds: that the kernel takes.
        fits: whether a thread surely has registers enough.
    """

    seconds: float
    fits: bool


def estimate(emitted: EmittedKernel, config: Config) -> Estimate:
    """What a kernel costs with these blocks, on the GPU that it is for.

    Args:
        emitted: the kernel.
        config: its blocks.
    """
    gpu, block = emitted.gpu, _Block.of(emitted.kernel, config)
    per_processor = min(
        _BLOCKS,
        _THREADS // block.threads,
        _REGISTERS // (min(block.registers, _MAX_REGISTERS) * block.threads),
    )
    num_blocks = max(1, emitted.num_blocks_in(config))
    at_a_time = min(num_blocks, max(1, per_processor) * gpu.num_processors)
    reached = min(1.0, at_a_time * block.bytes_asked / (gpu.bandwidth * _LATENCY))
    moving = emitted.num_bytes / (gpu.bandwidth * reached)
    waiting = math.ceil(num_blocks / at_a_time) * block.seconds_waiting
    return Estimate(max(moving, waiting) + block.seconds_waiting / block.turns, block.fits)


@dataclass(frozen=True, slots=True)
class _Block:
    """What a block of a kernel takes.

    Args:
        threads: how many threads it has.
        registers: how many registers each of these needs.
        bytes_asked: bytes that it has on their way at once: what it reads, or what it writes if that is more.
        seconds_waiting: how long it waits for memory, one load after the other.
        turns: how often its loop goes round; 1 without a loop.
    """

    threads: int
    registers: int
    bytes_asked: float
    seconds_waiting: float
    turns: int

    @property
    def fits(self) -> bool:
        return self.registers <= _SURE * min(_MAX_REGISTERS, _REGISTERS // self.threads)

    @classmethod
    def of(cls, kernel: Kernel, config: Config) -> _Block:
        threads = 32 * config.num_warps
        places = {"x": config.xblock, "r": config.rblock if kernel.r else 1}
        read, written = (
            [
                (math.prod(places[axis] for axis in axes_of(index)), dtype.itemsize)
                for index, dtype in accesses
            ]
            for accesses in (reads(kernel), writes(kernel))
        )
        held = sum(max(1.0, count / threads) for count, _ in read)
        guarded = [part.axes for part in kernel.parts() if isinstance(part.op, Load) and part.args]
        held += sum(math.prod(places[axis] for axis in axes) for axes in guarded) / threads / _GUARDS
        asked = max(sum(count * size for count, size in accesses) for accesses in (read, written))
        sums = [part for part in kernel.parts() if isinstance(part.op, Reduce)]
        turns = 1
        if kernel.p is not None:
            turns = math.ceil(hint_of(kernel.num_in_part) / config.xblock)
            held += len(written) * config.rblock / threads  # sums that every turn adds to
        elif sums and not is_persistent(kernel):
            turns = math.ceil(hint_of(kernel.num_reduced) / config.rblock)
            held += num_lanes(sums) * max(1.0, config.xblock * config.rblock / threads)
        levels = max((part.level for part in kernel.parts()), default=0)
        waiting = turns * _LATENCY + levels * _EXCHANGE * (turns if kernel.p is not None else 1)
        return cls(threads, _OWN_REGISTERS + math.ceil(held), asked, waiting, turns)


# The ways to cut a kernel into blocks.

MOST = 4
"""Ways to try; each has to be compiled."""

_WORSE = 1.3  # times the best: further off than the model is wrong
_CLEARLY = 0.8  # times the usual: below this the model overrules it
_ELEMENTS = range(4, 33)  # of a block, a thread: 16 bytes of float32, to registers for one tensor
_WARPS = range(1, 17)
_SMALL_SECONDS = 5e-6  # about what it takes to start a kernel: nothing to win


def configurations(emitted: EmittedKernel) -> tuple[Config, ...]:
    """The configurations worth measuring: two to four, or one where tuning gains nothing.

    The first is the usual one, unless the model of costs clearly favours another, or a thread would have too
    few registers.

    Args:
        emitted: the kernel.
    """
    emitted = replace(emitted, ways=(_fitting(emitted),))
    usual = emitted.config
    at_usual = estimate(emitted, usual).seconds
    if at_usual < _SMALL_SECONDS:
        return (usual,)
    others = {config: estimate(emitted, config) for config in _neighbours(emitted)}
    seconds = {config: cost.seconds for config, cost in others.items() if cost.fits}
    least = min([at_usual, *seconds.values()])
    near = sorted(
        (config for config in seconds if seconds[config] <= _WORSE * least), key=seconds.__getitem__
    )
    is_overruled = least < _CLEARLY * at_usual
    ranked = [near[0], usual, *near[1:]] if is_overruled else [usual, *near]
    return tuple(ranked[:MOST])


def _fitting(emitted: EmittedKernel) -> Config:
    """The default blocks, made smaller until a thread's registers hold its elements of every tensor."""
    config = emitted.config
    while not estimate(emitted, config).fits:
        others = [
            other
            for other in _neighbours(replace(emitted, ways=(config,)))
            if other.num_warps >= config.num_warps and _num_elements(other) < _num_elements(config)
        ]
        if not others:
            break
        # Of more warps, each thread has fewer registers.
        num_warps = min(other.num_warps for other in others)
        costs = {other: estimate(emitted, other) for other in others if other.num_warps == num_warps}
        config = min(costs, key=lambda other: (not costs[other].fits, costs[other].seconds))
    return config


def _num_elements(config: Config) -> int:
    """Of a block, a thread."""
    return config.xblock * config.rblock // (32 * config.num_warps)


def _neighbours(emitted: EmittedKernel) -> Iterator[Config]:
    """Configurations with twice and half the block size or warps, as far as the source allows."""
    usual, kernel = emitted.config, emitted.kernel
    is_alone = len(emitted.members) == 1  # the source of several says which block begins a member
    xblocks = _sizes(usual.xblock) if is_alone and kernel.p is None else (usual.xblock,)
    if kernel.r and is_wide(kernel):
        xblocks = tuple(xblock for xblock in xblocks if xblock >= min(usual.xblock, MIN_COLUMNS))
    has_any_rblock = kernel.is_tiled or not is_persistent(kernel)
    rblocks = _sizes(usual.rblock) if is_alone and kernel.r and has_any_rblock else (usual.rblock,)
    for num_warps in _sizes(usual.num_warps):
        for xblock in xblocks:
            for rblock in rblocks:
                config = replace(usual, xblock=xblock, rblock=rblock, num_warps=num_warps)
                is_sound = num_warps in _WARPS and _num_elements(config) in _ELEMENTS
                if is_sound and config != usual:
                    yield config


def _sizes(usual: int) -> tuple[int, ...]:
    return (usual, usual * 2, max(1, usual // 2))
