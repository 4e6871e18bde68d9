"""The plans of all steps; their order is defined here alone."""

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
    """The plans between the graph and the autograd node around it.

    Args:
        unwrap: how inputs are unwrapped and outputs wrapped.
        writes: writes without history.
        rng: where seed and offset come from, if the graph takes them.
    """

    unwrap: UnwrapPlan
    writes: PlainWrites
    rng: RngPlan = HIDDEN_STATE

    def lift(self, call: Call, sizes: Sequence[int] = ()) -> Call:
        """The function inside of the autograd node, given the one of the graph.

        Args:
            call: plain tensors, sizes, seed and offset -> results.
            sizes: the numbers that it takes.
        """
        drawing = self.rng.lift(call)
        return self.unwrap.lift(self.writes.lift(lambda plains: drawing([*plains, *sizes])))


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans between the graph and the program: outside of the autograd node, then inside of it."""

    epilogue: EpiloguePlan
    writes: DifferentiableWrites
    inside: InsidePlans

    @classmethod
    def of(cls, program: Program[PrimalIdx], facts: Facts, drawn_on: torch.device | None = None) -> Plans:
        """The plans that the facts of a trace give.

        Args:
            program: as it was traced.
            facts: what the trace showed.
            drawn_on: the device of the seed and the offset, if the graph takes these.
        """
        return cls(
            plan_epilogue(facts),
            plan_differentiable(program, facts),
            InsidePlans(plan_unwrap(facts), plan_plain(program, facts), RngPlan(drawn_on)),
        )

    def lift_outside(self, call: Call, *, enables_grad: bool = False) -> Call:
        """The function that the caller gets, given the one of the autograd node.

        Args:
            call: primals -> results of the node.
            enables_grad: results have a history even if grad mode is off.
        """
        call = self.writes.lift(call)
        return self.epilogue.lift(torch.enable_grad()(call) if enables_grad else call)
