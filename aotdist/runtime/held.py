"""What the context (`ctx`) of an autograd node holds for its backward, by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from aotdist.convention.rng import SLOTS as RNG_SLOTS
from aotdist.convention.version import version_of
from aotdist.errors import UnsupportedProgram
from aotdist.program import Slot
from aotdist.runtime.plan import NodePlan
from aotdist.sizes import Expression, evaluate
from aotdist.torch_seam.autograd import keeps_graph


def held_by_name(
    ctx: Any,
    plan: NodePlan,
    apart: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    needed: Collection[int | Slot],
) -> dict[Slot, Any]:
    """Saved values, kept inputs, sizes, seed and offset, by name.

    Args:
        ctx: the context of the node.
        plan: the plan of the node.
        apart: gives the plain tensors of an input.
        needed: the names of the values whose data the backward reads.

    Raises:
        RuntimeError: a saved value was written since the forward; autograd's own error.
        UnsupportedProgram: a kept input was written since, which eager would not look at.
    """
    saved, kept = plan.saved, plan.kept
    held: dict[Slot, Any] = dict(zip(saved.slots, ctx.saved_tensors if saved.frees else (), strict=True))
    for (position, slots), version in zip(kept.unsaved, ctx.versions if kept.unsaved else (), strict=True):
        if version_of(ctx.kept_primals[position]) != version and any(slot in needed for slot in slots):
            raise _written_since(slots[0].path)
    plains = [plain for primal in ctx.kept_primals for plain in apart(primal)] if kept.primals else []
    held.update(zip(kept.slots, plains, strict=True))
    held.update(sizes_by_name(plan.sizes, ctx))
    held.update(zip(RNG_SLOTS, ctx.rng, strict=True) if plan.rng.draw else ())
    return held


def sizes_by_name(expressions: Sequence[Expression], ctx: Any) -> dict[Slot, Any]:
    """The numbers of a call, by the names of the arguments that they are."""
    return {Slot("size", size): evaluate(size, ctx.symbols) for size in expressions}


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
