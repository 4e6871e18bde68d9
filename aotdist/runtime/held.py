"""What the context (`ctx`) of an autograd node holds for its backward, by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.aliasing.version import version_of
from aotdist.convention.rng import SLOTS as RNG_SLOTS
from aotdist.errors import UnsupportedProgram
from aotdist.program import Slot
from aotdist.runtime.plan import NodePlan
from aotdist.sizes import Expression, evaluate
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.autograd import keeps_graph


@dataclass(frozen=True, slots=True)
class Arguments:
    """Where the arguments of a backward's graph come from.

    Args:
        sources: for each, its position among what the node holds and is given; or a number, as an expression
            in the sizes of the call.
        inputs: names of kept inputs among them.
    """

    sources: tuple[int | Expression, ...]
    inputs: frozenset[Slot]

    @classmethod
    def of(cls, plan: NodePlan, ins: Sequence[Slot], gradients: Sequence[Slot]) -> Arguments:
        """Those named `ins`, of which `gradients` are given."""
        rng = RNG_SLOTS if plan.rng.draw else ()
        held = (*plan.saved.slots, *plan.backward_writes.read, *rng, *gradients, *plan.kept.slots)
        position = {slot: at for at, slot in enumerate(held)}
        sources = tuple(slot.path if slot.role == "size" else position[slot] for slot in ins)
        return cls(sources, frozenset(plan.kept.slots).intersection(ins))

    def read(self, ctx: Any, plan: NodePlan, saved: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """The arguments.

        Args:
            ctx: the context of the node.
            plan: the plan of the node.
            saved: the saved values.
            gradients: the plain tensors of what arrived, as the graph takes them.

        Raises:
            UnsupportedProgram: a kept input was written since, which eager would not look at.
        """
        held = [*saved, *(ctx.written[position] for position in plan.backward_writes.read.values())]
        held += [*(ctx.rng if plan.rng.draw else ()), *gradients]
        if self.inputs:
            check_unwritten(ctx, plan, self.inputs)
            held += [plain for primal in ctx.kept_primals for plain in plain_tensors(primal)]
        return [evaluate(at, ctx.symbols) if isinstance(at, str) else held[at] for at in self.sources]


def saved_by(ctx: Any, plan: NodePlan) -> Sequence[torch.Tensor]:
    """The saved values.

    Raises:
        RuntimeError: one was written since the forward, or they were freed; autograd's own error.
    """
    return ctx.saved_tensors if plan.saved.frees else ()


def check_unwritten(ctx: Any, plan: NodePlan, needed: Collection[Slot]) -> None:
    """See that the kept inputs are as they were.

    Raises:
        UnsupportedProgram: one of those that are needed was written since, which eager would not look at.
    """
    kept = plan.kept
    for (position, slots), version in zip(kept.unsaved, ctx.versions if kept.unsaved else (), strict=True):
        if version_of(ctx.kept_primals[position]) != version and any(slot in needed for slot in slots):
            raise _written_since(slots[0].path)


def run_once(ctx: Any) -> None:
    """Note that the backward runs.

    Raises:
        UnsupportedProgram: it has run before.
    """
    if getattr(ctx, "has_run", False):
        raise UnsupportedProgram(
            "a second backward is asked for, and the first wrote a tensor that the forward made and did not "
            "return, which gradients are computed of",
            stage="runtime",
            fix="return that tensor too; or compute all gradients in one backward",
        )
    ctx.has_run = True


def let_go(ctx: Any, plan: NodePlan) -> None:
    """Free what was saved, unless the graph is retained, or eager would have nothing to free."""
    if plan.saved.frees and not keeps_graph():
        ctx.maybe_clear_saved_tensors()
        ctx.kept_primals = None
        if getattr(ctx, "rest", None) is None:  # else the backwards of other results may come
            ctx.wrappers = ()


def _written_since(name: str) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"`{name}` was written after the forward, and its old value is needed, which was not saved: "
        "gradients are asked for with `create_graph=True`, or arrive as another kind of tensor",
        stage="runtime",
        fix=f"write `{name}` after that backward, or pass a clone of it",
    )
