"""Wrapper tensors are unwrapped before the graph, and rebuilt after it.

Source: "AOTDispatch subclass support" (pytorch#104483); here the wrapper is rebuilt around the functional
tensors, so the layers inside of this one see plain tensors alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.aliasing.overwrite import bump
from aotdist.facts import DataWritten, Facts, Untouched
from aotdist.program import Call, NodeOutIdx, PlainIdx, PrimalIdx, Row
from aotdist.subclasses.protocol import Recipe, Wrapper, leaves, plain_tensors, rebuild


@dataclass(frozen=True, slots=True)
class UnwrapPlan:
    """How inputs are unwrapped and outputs rebuilt.

    Args:
        ins: recipe of each input.
        outs: recipe of each output.
        bumps: inputs whose writes no other layer counts, each with the number of writes.
    """

    ins: Row[PrimalIdx, Recipe]
    outs: Row[NodeOutIdx, Recipe]
    bumps: tuple[tuple[PrimalIdx, int], ...]

    def lift(self, call: Call) -> Call:
        """Unwrap the inputs, rebuild the outputs."""

        def lifted(primals: Sequence[Any]) -> list[Any]:
            results = call([plain for primal in primals for plain in plain_tensors(primal)])
            self.count(primals)
            return rebuild_all(self.outs, results)

        return lifted

    def count(self, primals: Sequence[Any]) -> None:
        """Count the writes."""
        for idx, count in self.bumps:
            bump(primals[idx], count)


def rebuild_all(recipes: Iterable[Recipe], plains: Sequence[Any]) -> list[Any]:
    """One tensor for each recipe, from the plain tensors of all of them."""
    remaining = iter(plains)
    built = [rebuild(recipe, [next(remaining) for _ in leaves(recipe)]) for recipe in recipes]
    assert next(remaining, None) is None, "more plain tensors than the recipes have leaves"
    return built


def plain_positions(recipes: Row[PrimalIdx, Recipe]) -> Row[PrimalIdx, tuple[PlainIdx, ...]]:
    """The positions of the plain tensors of each input among all plain tensors."""
    positions: list[tuple[PlainIdx, ...]] = []
    start = 0
    for recipe in recipes:
        count = sum(1 for _ in leaves(recipe))
        positions.append(tuple(PlainIdx(start + offset) for offset in range(count)))
        start += count
    return Row(positions)


def plan_unwrap(facts: Facts) -> UnwrapPlan:
    """How the call's tensors are unwrapped, and results rebuilt."""
    node_outs = [out for out in facts.node_outs if out.slot.role == "output" or out.differentiable]
    return UnwrapPlan(facts.recipes, Row(out.recipe for out in node_outs), _bumps(facts))


def _bumps(facts: Facts) -> tuple[tuple[PrimalIdx, int], ...]:
    found: list[tuple[PrimalIdx, int]] = []
    for idx, fact in facts.inputs.enumerate():
        match fact:
            case Untouched(bumps=bumps):
                found.append((idx, bumps))
            case DataWritten(differentiable=differentiable, bumps=bumps):
                if isinstance(facts.recipes[idx], Wrapper) and not differentiable:
                    found.append((idx, bumps))
    return tuple(each for each in found if each[-1])


def shell_of(recipe: Recipe) -> torch.Tensor:
    """A tensor rebuilt from `recipe`, without data."""
    plains = [
        torch.empty_strided(plain.size, plain.stride, dtype=plain.dtype, device="meta")
        for _, plain in leaves(recipe)
    ]
    return rebuild(recipe, plains)
