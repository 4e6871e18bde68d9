"""The layers in order, from the outside in: this is the only place that says so."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aotdist.convention.epilogue import EPILOGUE, EpiloguePlan
from aotdist.convention.metadata import METADATA, SwitchedOn
from aotdist.convention.mutation import DIFFERENTIABLE, PLAIN, DifferentiableWrites, PlainWrites
from aotdist.convention.rng import HIDDEN_STATE, FunctionalRng, RngPlan
from aotdist.convention.subclass import UNWRAP, UnwrapPlan
from aotdist.facts import Facts
from aotdist.program import PlainIdx, PrimalIdx, Program


@dataclass(frozen=True, slots=True)
class Plans:
    """What undoes the layers at run time. The first three act outside of the autograd node."""

    epilogue: EpiloguePlan
    switched_on: SwitchedOn
    writes: DifferentiableWrites
    unwrap: UnwrapPlan
    plain_writes: PlainWrites
    rng: RngPlan = HIDDEN_STATE


def lower_all(
    program: Program[PrimalIdx], facts: Facts, *, drawn_on: torch.device | None = None
) -> tuple[Program[PlainIdx], Plans]:
    """The program that the graph implements, and the plans of every layer above it.

    Args:
        program: as it was traced.
        facts: what the trace showed.
        drawn_on: where seed and offset lie that the graph takes, if it does.
    """
    inner, epilogue = EPILOGUE.lower(program, facts)
    inner, switched_on = METADATA.lower(inner, facts)
    inner, writes = DIFFERENTIABLE.lower(inner, facts)
    plain, unwrap = UNWRAP.lower(inner, facts)
    functional, plain_writes = PLAIN.lower(plain, facts)
    if drawn_on is None:
        return functional, Plans(epilogue, switched_on, writes, unwrap, plain_writes)
    pure, rng = FunctionalRng(drawn_on).lower(functional, facts)
    return pure, Plans(epilogue, switched_on, writes, unwrap, plain_writes, rng)
