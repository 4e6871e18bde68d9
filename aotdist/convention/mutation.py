"""Writes to inputs: the region returns new values, and they are copied in outside of it.

There are two layers, on the two sides of the autograd node. A write that takes part in the backward
(`x.mul_(w)` with `w` requiring grad) is done outside of the node, to the user's tensor, which so gets its
history. Any other write (batch-norm statistics, counters, caches, writes under `no_grad`) is a `copy_` on the
plain tensors, inside of it: a wrapper's own `copy_`, which may compute, is never called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.aliasing.overwrite import bump, put, refuse_forbidden
from aotdist.convention.subclass import plain_positions
from aotdist.facts import DataWritten, Facts
from aotdist.program import Call, NodeOutIdx, PlainIdx, PrimalIdx, Program
from aotdist.subclasses.protocol import Wrapper, is_wrapper, leaves


def write_plain(target: torch.Tensor, value: torch.Tensor, bumps: int) -> None:
    """Overwrite `target` with `value`, without history, and count `bumps` writes (none for `.data`).

    If a kernel has stored the value there already, `value` is `target`.
    """
    if value is target:
        bump(target, bumps)
    elif bumps:
        target.copy_(value)
        bump(target, bumps - 1)
    else:
        target.data.copy_(value)


@dataclass(frozen=True, slots=True)
class DifferentiableWrites:
    """Inputs that get a new value with history.

    Args:
        writes: input, position of its new value among the node's outputs, number of writes to count.
        num_values: how many of the node's outputs are results; new values follow them.
        counted: inputs with a history that are written under `no_grad`, and how often. These writes are
            counted before the region runs: autograd then rebuilds the history of their views, which the
            region's results follow from, as in eager.
    """

    writes: tuple[tuple[PrimalIdx, NodeOutIdx, int], ...]
    num_values: int
    counted: tuple[tuple[PrimalIdx, int], ...] = ()

    def lift(self, call: Call) -> Call:
        """Write the new values, under autograd."""

        def lifted(primals: Sequence[Any]) -> list[Any]:
            self.prepare(primals)
            outs = call(primals)
            for primal, value, bumps in self.writes:
                put(primals[primal], outs[value], bumps)
            return outs[: self.num_values]

        return lifted

    def prepare(self, primals: Sequence[Any]) -> None:
        """Check and count writes before the region runs."""
        refuse_forbidden(*(primals[primal] for primal, _, _ in self.writes))
        for primal, bumps in self.counted:
            bump(primals[primal], bumps)


@dataclass(frozen=True, slots=True)
class PlainWrites:
    """Plain inputs that get a new value without history.

    Args:
        writes: plain input, position of its new value among the graph's results, number of writes to count.
        num_values: how many of the graph's results stay; new values follow them.
    """

    writes: tuple[tuple[PlainIdx, int, int], ...]
    num_values: int

    def lift(self, call: Call) -> Call:
        """Write the new values, without autograd."""

        def lifted(plains: Sequence[Any]) -> list[Any]:
            kept = [plains[idx] for idx, _, _ in self.writes]
            results = call(plains)
            with torch.no_grad():
                for plain, (_, position, bumps) in zip(kept, self.writes, strict=True):
                    write_plain(plain, results[position], bumps)
            return results[: self.num_values]

        return lifted


def differentiable_writes(facts: Facts) -> list[tuple[PrimalIdx, NodeOutIdx, int]]:
    """Inputs that are written with history: which, with what, how often."""
    return [
        (idx, fact.value, fact.bumps)
        for idx, fact in facts.inputs.enumerate()
        if isinstance(fact, DataWritten) and fact.differentiable
    ]


def plain_writes(facts: Facts) -> list[tuple[PrimalIdx, int]]:
    """Inputs that are written without history: which, how often."""
    return [
        (idx, fact.bumps)
        for idx, fact in facts.inputs.enumerate()
        if isinstance(fact, DataWritten) and not fact.differentiable
    ]


def plan_differentiable(program: Program[PrimalIdx], facts: Facts) -> DifferentiableWrites:
    """How new values with history are written."""
    writes, plain = differentiable_writes(facts), plain_writes(facts)
    counted = [(idx, bumps) for idx, bumps in plain if _has_history(program.examples[idx])]
    return DifferentiableWrites(
        tuple(writes), len(facts.node_outs) - len(writes) - len(plain), tuple(counted)
    )


def plan_plain(program: Program[PrimalIdx], facts: Facts) -> PlainWrites:
    """How new values without history are written."""
    positions = plain_positions(facts.recipes)
    targets = {
        # Inside of a wrapper writes are not counted: eager only bumps the wrapper, which `UnwrapPlan` does.
        plain: 0 if isinstance(facts.recipes[idx], Wrapper) or _has_history(program.examples[idx]) else bumps
        for idx, bumps in plain_writes(facts)
        for plain in positions[idx]
    }
    num_values = sum(1 for out in facts.node_outs for _ in leaves(out.recipe)) - len(targets)
    writes = tuple((idx, num_values + at, bumps) for at, (idx, bumps) in enumerate(targets.items()))
    return PlainWrites(writes, num_values)


def _has_history(example: torch.Tensor) -> bool:
    return example.requires_grad and not example.is_leaf and not is_wrapper(example)
