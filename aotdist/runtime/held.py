"""What the context (`ctx`) of the autograd node holds for its backward.

Losses may be differentiated one after the other without `retain_graph`. After the backward of some results,
autograd frees everything that the node saved. In eager, results that share no autograd nodes with these can
still be differentiated, as their own nodes still have what they saved. So saved values are kept for them
(`Rest`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from aotdist.aliasing.overwrite import version_of
from aotdist.convention.rng import SLOTS as RNG_SLOTS
from aotdist.errors import UnsupportedProgram
from aotdist.program import NodeOutIdx, Slot
from aotdist.runtime.plan import NodePlan
from aotdist.sizes import Expression, evaluate
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.autograd import keeps_graph


@dataclass(frozen=True, slots=True)
class Arguments:
    """Where the arguments of a backward graph come from.

    Args:
        sources: for each, its position among what the node holds and the tangents; or a number, as an
            expression in the sizes of the call.
        inputs: names of the kept inputs among them.
    """

    sources: tuple[int | Expression, ...]
    inputs: frozenset[Slot]

    @classmethod
    def of(cls, plan: NodePlan, ins: Sequence[Slot], gradients: Sequence[Slot]) -> Arguments:
        """Of a graph that takes `ins`, of which `gradients` are the tangents."""
        rng = RNG_SLOTS if plan.inside.rng.draw else ()
        held = (*plan.saved.slots, *plan.backward_writes.read, *rng, *gradients, *plan.kept_inputs.slots)
        position = {slot: at for at, slot in enumerate(held)}
        sources = tuple(slot.path if slot.role == "size" else position[slot] for slot in ins)
        return cls(sources, frozenset(plan.kept_inputs.slots).intersection(ins))

    def read(self, ctx: Any, plan: NodePlan, saved: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
        """The arguments.

        Args:
            ctx: the context of the node.
            plan: the plan of the node.
            saved: the saved values.
            gradients: the plain tensors of the tangents, as the graph takes them.

        Raises:
            UnsupportedProgram: a kept input was written since the forward, which eager would not notice.
        """
        held = [*saved, *(ctx.written[position] for position in plan.backward_writes.read.values())]
        held += [*(ctx.rng if plan.inside.rng.draw else ()), *gradients]
        if self.inputs:
            check_kept_inputs(ctx, plan, self.inputs)
            held += [plain for primal in ctx.kept_primals for plain in plain_tensors(primal)]
        return [evaluate(at, ctx.symbols) if isinstance(at, str) else held[at] for at in self.sources]


def check_kept_inputs(ctx: Any, plan: NodePlan, needed: Collection[Slot]) -> None:
    """Check that the needed ones among the kept inputs have not been written since the forward.

    Raises:
        UnsupportedProgram: one was written.
    """
    kept = plan.kept_inputs
    for (position, slots), version in zip(kept.unsaved, ctx.versions if kept.unsaved else (), strict=True):
        if version_of(ctx.kept_primals[position]) != version and any(slot in needed for slot in slots):
            name = slots[0].path
            raise UnsupportedProgram(
                f"`{name}` was written after the forward, and its old value is needed, which was not saved: "
                "gradients are asked for with `create_graph=True`, or arrive as another kind of tensor",
                stage="runtime",
                fix=f"write `{name}` after that backward, or pass a clone of it",
            )


def check_unwritten(versions: Sequence[tuple[torch.Tensor, int]], names: Sequence[str]) -> None:
    """Check that no wrapper whose plain tensors were saved has been written since the forward.

    Args:
        versions: tensors that share the version counters of wrappers, each with the version in the forward.
        names: of the wrappers.

    Raises:
        RuntimeError: one was; with autograd's message.
    """
    for position, (wrapper, version) in enumerate(versions):
        if wrapper._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: `{names[position]}`, of size {list(wrapper.size())}, is at version "
                f"{wrapper._version}; expected version {version} instead"
            )


def run_once(ctx: Any) -> None:
    """Refuse a second run of a backward that can run only once (`BackwardFacts.once`).

    Raises:
        UnsupportedProgram: it is the second run.
    """
    if getattr(ctx, "has_run", False):
        raise UnsupportedProgram(
            "a second backward is asked for, and the first wrote a tensor that the forward made and did not "
            "return, and that gradients may follow from",
            stage="runtime",
            fix="return that tensor too; or compute all gradients in one backward",
        )
    ctx.has_run = True


def let_go(ctx: Any) -> None:
    """Free the saved values, unless the graph is retained."""
    if not keeps_graph():
        ctx.maybe_clear_saved_tensors()
        ctx.kept_primals = None
        if getattr(ctx, "rest", None) is None:  # else a backward of other results may follow
            ctx.wrappers = ()


Rest: TypeAlias = "tuple[frozenset[NodeOutIdx], tuple[tuple[torch.Tensor, int], ...] | None]"
"""What is kept after a backward of some results: the results whose values are freed (none if the graph was
retained), and all saved values with their version counters, or None if no other result needs them."""


def saved_for(
    ctx: Any, plan: NodePlan, arrived: Collection[NodeOutIdx], reads: Collection[int]
) -> list[torch.Tensor]:
    """The saved values for the backward of some results, which reads those at positions `reads`.

    Raises:
        RuntimeError: one that it reads was freed, or written since; autograd's own error.
    """
    done, values = _rest(ctx)
    if values is None or not _are_independent(plan, done, arrived):
        return list(ctx.saved_tensors)
    if any(version_of(value) != version for value, version in (values[k] for k in reads)):
        return list(ctx.saved_tensors)
    return [value for value, _ in values]


def _rest(ctx: Any) -> Rest:
    return getattr(ctx, "rest", None) or (frozenset(), None)


def keep_for_others(
    ctx: Any, plan: NodePlan, arrived: Collection[NodeOutIdx], saved: Sequence[torch.Tensor]
) -> None:
    """Keep the saved values for results that need nothing that was freed.

    Of a retained graph, too: the node hands out all or none, and what only `arrived` needs may be written.
    """
    before, values = _rest(ctx)
    done = before if keeps_graph() else before.union(arrived)
    if not any(idx not in done and _are_independent(plan, done, [idx]) for idx in plan.differentiable()):
        values = None
    elif values is None and not before:
        # Detached, since a saved result would keep its own node alive.
        values = tuple((value.detach(), version_of(value)) for value in saved)
    ctx.rest = done, values


def _are_independent(plan: NodePlan, one: Collection[NodeOutIdx], other: Collection[NodeOutIdx]) -> bool:
    """Whether the backward of `one` frees nothing that the backward of `other` needs."""
    return all(together.isdisjoint(one) or together.isdisjoint(other) for together in plan.backward.freed)
