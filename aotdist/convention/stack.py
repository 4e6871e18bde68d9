"""The layers in order, from the outside in: this is the only place that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aotdist.convention.epilogue import EPILOGUE, EpiloguePlan
from aotdist.convention.layer import Call, Layer
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

    def lift_inside(self, call: Call, sizes: Sequence[int] = ()) -> Call:
        """What `call`, the graph's convention, is inside of the autograd node.

        Args:
            call: plain tensors, sizes, seed and offset -> results.
            sizes: the numbers that it takes.
        """
        drawing = self.rng.lift(call)
        return self.unwrap.lift(self.plain_writes.lift(lambda plains: drawing([*plains, *sizes])))

    def lift_outside(self, call: Call, *, enables_grad: bool = False) -> Call:
        """What `call`, the node's convention, is to the caller.

        Args:
            call: primals -> results of the node.
            enables_grad: results have a history although the caller has grad mode off.
        """
        call = self.switched_on.lift(self.writes.lift(call))
        return self.epilogue.lift(torch.enable_grad()(call) if enables_grad else call)


OUTSIDE: tuple[Layer, ...] = (EPILOGUE, METADATA, DIFFERENTIABLE)
"""The layers outside of the autograd node."""
INSIDE: tuple[Layer, ...] = (UNWRAP, PLAIN)
"""Those inside of it; beneath them, `FunctionalRng` if it is asked for."""


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
