"""The autograd node around one compiled forward and backward: its plan, and a reference to run it.

The reference is what the printed node (`aotdist.runtime.print_node`) is tested against: the same
steps, found by walking the plan at every call instead of once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.codegen.contract import BoxedCall, Strides
from aotdist.convention.changes import resize_storage
from aotdist.convention.layer import Call
from aotdist.convention.mutation import PlainWrites, write_plain
from aotdist.convention.stack import Plans
from aotdist.convention.subclass import UnwrapPlan, plain_positions, rebuild_all
from aotdist.convention.version import bump
from aotdist.errors import UnsupportedProgram
from aotdist.facts import NodeOut
from aotdist.joint.trace import Traced
from aotdist.partition.again import Again
from aotdist.partition.traits import is_view
from aotdist.program import Graph, NodeOutIdx, PlainIdx, PrimalIdx, Row, Slot, Split
from aotdist.runtime.tangent import Tangent
from aotdist.subclasses.protocol import Plain, Recipe, Wrapper, leaves, plain_tensors, rebuild, tangent_recipe
from aotdist.torch_seam import any_autocast, autocast_off, keeps_graph


@dataclass(frozen=True, slots=True)
class SavedInput:
    """A saved value that is a plain input.

    Args:
        plain: which.
        changes: whether it has other sizes, or lies elsewhere, when the backward comes.
    """

    plain: PlainIdx
    changes: bool


@dataclass(frozen=True, slots=True)
class SavedResult:
    """A saved value that the forward graph returns, at this position among its results."""

    position: int


@dataclass(frozen=True, slots=True)
class NodePlan:
    """How tensors pass through the node.

    Args:
        unwrap: how inputs are taken apart and outputs put together.
        writes: writes without history, done inside.
        outs: what the node returns; `writes` of its own have been dropped.
        saved: where each argument of the backward graph before the tangents comes from.
        tangents: recipes of the tangents to assume, one for each differentiable output.
        grads: recipe of each input's gradient, or None.
        backward_writes: plain inputs that the backward writes; their new values follow the gradients.
        backward_storages: plain inputs whose storage the backward gives another size, and its bytes.
        views: forward results that are made as views, see `result_views`.
        again: the inputs to keep for differentiating twice.
        obstacle: why that cannot be done, if so.
    """

    unwrap: UnwrapPlan
    writes: PlainWrites
    outs: Row[NodeOutIdx, NodeOut]
    saved: tuple[SavedInput | SavedResult, ...]
    tangents: tuple[Tangent, ...]
    grads: Row[PrimalIdx, Recipe | None]
    backward_writes: tuple[PlainIdx, ...]
    backward_storages: tuple[tuple[PlainIdx, int], ...]
    views: frozenset[int]
    again: tuple[PrimalIdx, ...]
    obstacle: str | None

    def differentiable(self) -> list[NodeOutIdx]:
        """Outputs that gradients can come back for."""
        return [idx for idx, out in self.outs.enumerate() if out.differentiable]


def node_plan(
    traced: Traced, plans: Plans, split: Split, tangent_strides: Mapping[Slot, Strides], again: Again
) -> NodePlan:
    """The plan of the node for a partitioned program.

    Args:
        traced: program and facts.
        plans: of the convention layers.
        split: the two graphs.
        tangent_strides: strides that the backward graph was compiled for.
        again: what differentiating twice takes.
    """
    facts = traced.facts
    position = {slot: idx for idx, slot in enumerate(traced.plain_ins())}
    result = {slot: idx for idx, slot in enumerate(split.forward.outs)}
    plains = plain_positions(facts.recipes)
    changing = {plain for idx in facts.reshaped() for plain in plains[idx]}
    saved = tuple(
        SavedInput(plain := PlainIdx(position[split.saved_primals[slot]]), plain in changing)
        if slot in split.saved_primals
        else SavedResult(result[slot])
        for slot in split.saved
    )
    outs = Row[NodeOutIdx, NodeOut](list(facts.node_outs)[: len(plans.unwrap.outs)])
    tangents = tuple(_tangent(out, tangent_strides) for out in outs if out.differentiable)
    backward_writes = tuple(plain for write in facts.backward_writes for plain in plains[write.input])
    return NodePlan(
        plans.unwrap,
        plans.plain_writes,
        outs,
        saved,
        tangents,
        facts.grads,
        backward_writes,
        tuple((plains[idx][leaf], num_bytes) for idx, leaf, num_bytes in facts.backward_storages),
        result_views(split.forward),
        *_kept_for_again(traced, again),
    )


def _kept_for_again(traced: Traced, again: Again) -> tuple[tuple[PrimalIdx, ...], str | None]:
    facts = traced.facts
    recipes = [*facts.recipes, *(out.recipe for out in facts.node_outs)]
    wrapper = next((recipe for recipe in recipes if isinstance(recipe, Wrapper)), None)
    if wrapper is not None:
        return (), f"it works on tensors of type {wrapper.cls.__name__}"
    position = {slot: idx for idx, slot in traced.program.ins.enumerate()}
    kept = tuple(position[slot] for slot in again.primals)
    if not facts.reshaped().isdisjoint(kept):
        return (), "it writes the sizes, strides or storage of an input in place"
    return kept, again.obstacle


def result_views(graph: Graph) -> frozenset[int]:
    """Positions of the results that a graph makes as views of temporaries of its own.

    They must be detached: what was a tensor of its own in the user's program, written in place and then
    functionalised, may not be known to autograd as a view made inside of a node.
    """
    return frozenset(
        position for position, node in enumerate(graph.results()) if node is not None and is_view(node)
    )


def detached_views(results: Sequence[Any], views: frozenset[int]) -> list[Any]:
    """`results` with those at `views` detached, which keeps memory and version counter."""
    return [value.detach() if position in views else value for position, value in enumerate(results)]


def _tangent(out: NodeOut, strides: Mapping[Slot, Strides]) -> Tangent:
    recipe = tangent_recipe(out.recipe)
    slots = [Slot("tangent", out.slot.path, inner) for inner, _ in leaves(recipe)]
    return Tangent(out.slot.path, recipe, tuple(strides.get(slot) for slot in slots))


def make_node(plan: NodePlan, forward: BoxedCall, backward: Backward) -> Call:
    """The node as a call: the reference for the printed one.

    Args:
        plan: how tensors pass.
        forward: plain inputs -> results, then saved values.
        backward: what runs in the backward.
    """

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *primals: Any) -> Any:
            plains = [plain for primal in primals for plain in plain_tensors(primal)]
            results = list(forward(list(plains)))
            for plain, position, bumps in plan.writes.writes:
                write_plain(plains[plain], results[position], bumps)
            for idx, count in plan.unwrap.bumps:
                bump(primals[idx], count)
            ctx.save_for_backward(*(_saved(source, plains, results) for source in plan.saved))
            ctx.again = tuple(primals[idx] for idx in plan.again)
            ctx.written = [plains[idx] for idx in plan.backward_writes]
            ctx.resized = [plains[idx] for idx, _ in plan.backward_storages]
            values = detached_views(results[: plan.writes.num_values], plan.views)
            outs = rebuild_all(plan.unwrap.outs, values)
            ctx.mark_non_differentiable(
                *(outs[idx] for idx, out in plan.outs.enumerate() if not out.differentiable)
            )
            ctx.set_materialize_grads(False)
            return tuple(outs)

        @staticmethod
        def backward(ctx: Any, *tangents: Any) -> Any:
            run = backward.again if torch.is_grad_enabled() else backward
            return run(ctx, *(tangents[idx] for idx in plan.differentiable()))

    return lambda primals: list(Node.apply(*primals))


@dataclass(frozen=True, slots=True)
class Backward:
    """The backward of a node, step by step; the printed one leaves to it the calls that lack a tangent.

    Args:
        plan: how tensors pass.
        whole: saved values, tangents -> gradients, then backward writes.
        reduced: the same without the tangents of some slots.
        twice: the gradients as autograd records them, given what the plan keeps and all tangents.
        after: called when the gradients are there.
    """

    plan: NodePlan
    whole: BoxedCall
    reduced: Callable[[frozenset[Slot]], BoxedCall]
    twice: Callable[..., list[torch.Tensor]]
    after: Callable[[], None]

    def __call__(self, ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        """The gradients, given a tangent, or None, for each differentiable output."""
        pairs = list(zip(self.plan.tangents, tangents, strict=True))
        if all(arrived is None for _, arrived in pairs):
            return (None,) * len(self.plan.grads)
        missing = frozenset(slot for tangent, arrived in pairs if arrived is None for slot in tangent.slots())
        args = list(ctx.saved_tensors)
        args += [plain for tangent, arrived in pairs if arrived is not None for plain in tangent(arrived)]
        if not keeps_graph():
            ctx.maybe_clear_saved_tensors()
            ctx.again = None
        results = list((self.reduced(missing) if missing else self.whole)(args))
        grads, written = _split_grads(self.plan, results)
        resizes = self.plan.backward_storages
        for plain, (_, num_bytes) in zip(ctx.resized if resizes else (), resizes, strict=True):
            resize_storage(plain, num_bytes)
        for plain, value in zip(ctx.written if self.plan.backward_writes else (), written, strict=True):
            if value is not None:
                plain.copy_(value)
        self.after()
        return tuple(grads)

    def again(self, ctx: Any, *tangents: torch.Tensor | None) -> tuple[Any, ...]:
        """The gradients with a history (`create_graph=True`).

        Raises:
            UnsupportedProgram: the program cannot be differentiated twice.
        """
        if self.plan.obstacle is not None:
            raise UnsupportedProgram(
                "the backward of a compiled program is asked for its own gradient (`create_graph=True`), but "
                f"{self.plan.obstacle}",
                stage="runtime",
                fix="leave the part that is differentiated twice out of the compiled function",
            )
        if all(tangent is None for tangent in tangents):
            return (None,) * len(self.plan.grads)
        ctx.saved_tensors  # noqa: B018  # raises where one was written since
        given = [
            _zeros(tangent.recipe, ctx.again) if arrived is None else arrived
            for tangent, arrived in zip(self.plan.tangents, tangents, strict=True)
        ]
        found = iter(self.twice(*ctx.again, *given))
        return tuple(None if recipe is None else next(found) for recipe in self.plan.grads)


def _zeros(recipe: Recipe, like: Sequence[torch.Tensor]) -> torch.Tensor:
    assert isinstance(recipe, Plain), "programs of wrappers are not differentiated twice"
    return torch.zeros(recipe.size, dtype=recipe.dtype, device=like[0].device)


def _saved(source: SavedInput | SavedResult, plains: Sequence[Any], results: Sequence[Any]) -> Any:
    if isinstance(source, SavedResult):
        return results[source.position]
    return plains[source.plain].detach() if source.changes else plains[source.plain]


def _split_grads(plan: NodePlan, results: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    remaining = iter(results)
    grads: list[Any] = []
    for recipe in plan.grads:
        if recipe is None:
            grads.append(None)
            continue
        plains = [next(remaining) for _ in leaves(recipe)]
        grads.append(None if any(plain is None for plain in plains) else rebuild(recipe, plains))
    return grads, list(remaining)


def without_autocast(call: BoxedCall) -> BoxedCall:
    """`call` with autocast off: a traced graph already holds its casts."""

    def quiet(args: list[Any]) -> Sequence[Any]:
        if not any_autocast():
            return call(args)
        with autocast_off():
            return call(args)

    return quiet
