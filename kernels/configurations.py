"""The few ways to cut a kernel into blocks that are worth trying, best first by what they should cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from aotdist.kernels.access import is_wide
from aotdist.kernels.costs import estimate
from aotdist.kernels.emitted import EmittedKernel
from aotdist.kernels.launching import MIN_COLUMNS, Config, is_persistent

MOST = 4
"""Ways to try; each has to be compiled."""

_WORSE = 1.3  # times the best: further off than the model is wrong
_CLEARLY = 0.8  # times the usual: below this the model overrules it
_ELEMENTS = range(4, 33)  # of a block, a thread: 16 bytes of float32, to registers for one tensor
_WARPS = range(1, 17)
_SMALL_SECONDS = 5e-6  # about what it takes to start a kernel: nothing to win


def configurations(emitted: EmittedKernel) -> tuple[Config, ...]:
    """The ways in which a kernel may be cut: two to four, or one where there is nothing to win.

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
    """The usual blocks; of a kernel of many tensors, such that a thread can hold its elements of all."""
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
    """Twice and half the places, and twice and half the warps, as far as the kernel's source allows."""
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
