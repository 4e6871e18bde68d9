"""The plans in order, from the outside in: this is the only place that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aotdist.convention.epilogue import EpiloguePlan, plan_epilogue
from aotdist.convention.mutation import DifferentiableWrites, PlainWrites, plan_differentiable, plan_plain
from aotdist.convention.rng import HIDDEN_STATE, RngPlan
from aotdist.convention.subclass import UnwrapPlan, plan_unwrap
from aotdist.facts import Facts
from aotdist.program import Call, PrimalIdx, Program


@dataclass(frozen=True, slots=True)
class InsidePlans:
    """What leads from the graph to the autograd node around it.

    Args:
        unwrap: how inputs are taken apart and outputs put together.
        writes: writes without history; what is written has been dropped from the results that remain.
        rng: where seed and offset come from, if the graph takes them.
    """

    unwrap: UnwrapPlan
    writes: PlainWrites
    rng: RngPlan = HIDDEN_STATE

    def lift(self, call: Call, sizes: Sequence[int] = ()) -> Call:
        """What `call`, the graph's convention, is inside of the autograd node.

        Args:
            call: plain tensors, sizes, seed and offset -> results.
            sizes: the numbers that it takes.
        """
        drawing = self.rng.lift(call)
        return self.unwrap.lift(self.writes.lift(lambda plains: drawing([*plains, *sizes])))


@dataclass(frozen=True, slots=True)
class Plans:
    """What leads from the graph back to the program: outside of the autograd node, then inside of it."""

    epilogue: EpiloguePlan
    writes: DifferentiableWrites
    inside: InsidePlans

    @classmethod
    def of(cls, program: Program[PrimalIdx], facts: Facts, drawn_on: torch.device | None = None) -> Plans:
        """What leads from the graph of a trace back to the program.

        Args:
            program: as it was traced.
            facts: what the trace showed.
            drawn_on: where seed and offset lie that the graph takes, if it does.
        """
        return cls(
            plan_epilogue(facts),
            plan_differentiable(program, facts),
            InsidePlans(plan_unwrap(facts), plan_plain(program, facts), RngPlan(drawn_on)),
        )

    def lift_outside(self, call: Call, *, enables_grad: bool = False) -> Call:
        """What `call`, the node's convention, is to the caller.

        Args:
            call: primals -> results of the node.
            enables_grad: results have a history although the caller has grad mode off.
        """
        call = self.writes.lift(call)
        return self.epilogue.lift(torch.enable_grad()(call) if enables_grad else call)
