"""The plan of the autograd node: what it takes, returns and saves, and what its backward takes and writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.fx import Node

from aotdist.codegen.contract import Strides
from aotdist.convention.stack import InsidePlans, Plans
from aotdist.convention.subclass import plain_positions
from aotdist.facts import BackwardFacts, Facts, NodeOut, ObservedGrad
from aotdist.partition.traits import is_view, view_base
from aotdist.program import Graph, NodeOutIdx, PlainIdx, PrimalIdx, Row, Slot, Split
from aotdist.runtime.tangent import Tangent
from aotdist.sizes import Expression
from aotdist.subclasses.protocol import Plain, Recipe, Wrapper, leaves, tangent_recipe
from aotdist.trace.trace import Traced

Grads: TypeAlias = "Mapping[NodeOutIdx, torch.Tensor | None]"
"""Tangents by output; None for those that did not arrive."""


@dataclass(frozen=True, slots=True)
class SavedWrappers:
    """The wrappers that share memory with values saved by the node.

    Autograd compares the version counters of saved tensors, which are plain tensors. A write to a wrapper
    around them, or to its views, increases the wrapper's own counter only.

    Args:
        ins: those among the inputs.
        outs: those among the outputs.
        names: of all of them, inputs first.
    """

    ins: tuple[PrimalIdx, ...]
    outs: tuple[NodeOutIdx, ...]
    names: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.names)

    @classmethod
    def of(
        cls,
        facts: Facts,
        plans: Plans,
        split: Split,
        names: Row[PrimalIdx, Slot],
        outs: Row[NodeOutIdx, NodeOut],
    ) -> SavedWrappers:
        """The wrappers that share memory with what the forward graph saves for the backward graph.

        Args:
            facts: of the program.
            plans: of the convention layers.
            split: the two graphs.
            names: of the inputs.
            outs: what the node returns.
        """
        saved = _saved_memory(split)
        given = {node: at for at, node in enumerate(split.forward.placeholders())}
        taken = {PlainIdx(given[node]) for node in saved if node in given}
        # These are written by the call itself, outside of the node.
        repeated = facts.reshaped() | {idx for idx, _, _ in plans.writes.writes}
        repeated |= facts.backward.writes.keys()
        ins = tuple(
            idx
            for idx, plains in plain_positions(facts.recipes).enumerate()
            if isinstance(facts.recipes[idx], Wrapper)
            and idx not in repeated
            and not taken.isdisjoint(plains)
        )
        made = tuple(idx for idx, nodes in _wrapped(split, outs) if not saved.isdisjoint(nodes))
        return cls(ins, made, (*(names[idx].path for idx in ins), *(outs[idx].slot.path for idx in made)))


@dataclass(frozen=True, slots=True)
class Saved:
    """What the node saves for the backward graph: plain inputs, then results of the forward graph.

    Args:
        inputs: which plain inputs; for each, whether the program changes its metadata before the backward.
        results: positions of the saved results.
        slots: the names of all saved values.
        wrappers: the wrappers that saved values lie in.
        frees: whether a backward frees anything, in eager or here; if not, nothing is saved.
    """

    inputs: tuple[tuple[PlainIdx, bool], ...]
    results: tuple[int, ...]
    slots: tuple[Slot, ...]
    wrappers: SavedWrappers
    frees: bool


@dataclass(frozen=True, slots=True)
class KeptInputs:
    """The inputs that the node keeps for `create_graph`, and for tangents of other kinds.

    Args:
        primals: the inputs.
        slots: the names of the plain tensors inside them.
        unsaved: those that autograd does not save as well, so that it does not notice writes to them:
            positions in `primals`, and names of the plain tensors inside.
    """

    primals: tuple[PrimalIdx, ...]
    slots: tuple[Slot, ...]
    unsaved: tuple[tuple[int, tuple[Slot, ...]], ...]


@dataclass(frozen=True, slots=True)
class BackwardWrites:
    """The inputs that the backward writes.

    Args:
        plains: the plain inputs; in the graph's results, their new values follow the gradients.
        bumps: by how much the version counter of each of `plains` increases.
        wrappers: the wrappers among these inputs, whose own counters increase instead, and by how much.
        read: arguments of the backward graph, after the tangents, that are the current values of these
            inputs: for each, its position in `plains`.
    """

    plains: tuple[PlainIdx, ...]
    bumps: tuple[int, ...]
    wrappers: tuple[tuple[PrimalIdx, int], ...]
    read: Mapping[Slot, int]


@dataclass(frozen=True, slots=True)
class NodePlan:
    """How tensors pass through the node.

    Args:
        inside: the convention layers inside the node.
        outs: what the node returns, without the values that `inside` writes.
        sizes: the numbers that the forward graph takes after its plain inputs.
        backward_sizes: those that the backward graph takes between saved values and tangents.
        saved: what it saves.
        kept_inputs: the inputs that it keeps.
        tangents: the tangent that is assumed for each differentiable output.
        backward: what the trace showed of the backward.
        shares: whether several gradients that are wrappers, or a gradient and a tangent, may be one tensor.
        other_kinds: whether tangents of other kinds than the results have a backward of their own.
        backward_writes: what the backward writes.
        totals: the tangents that are assumed for waypoints that the node returns: their whole gradients.
        views: forward results that are views of temporaries, see `result_views`.
    """

    inside: InsidePlans
    outs: Row[NodeOutIdx, NodeOut]
    sizes: tuple[Expression, ...]
    backward_sizes: tuple[Expression, ...]
    saved: Saved
    kept_inputs: KeptInputs
    tangents: tuple[Tangent, ...]
    backward: BackwardFacts
    shares: bool
    other_kinds: bool
    backward_writes: BackwardWrites
    totals: Mapping[NodeOutIdx, Tangent]
    views: frozenset[int]

    def expected(self, idx: NodeOutIdx, *, in_parts: bool) -> Tangent:
        """The tangent that is assumed for an output; `in_parts` if the backward is watched."""
        if in_parts and idx in self.totals:
            return self.totals[idx]
        return self.tangents[self.differentiable().index(idx)]

    def takes(self, arrived: Mapping[NodeOutIdx, torch.Tensor]) -> bool:
        """Whether the backward takes tangents of these kinds."""
        return all(self.expected(idx, in_parts=False).takes(grad) for idx, grad in arrived.items())

    def converts(self, arrived: Mapping[NodeOutIdx, torch.Tensor]) -> bool:
        """Whether the backward takes these tangents, or they can be converted."""
        return all(
            self.expected(idx, in_parts=False).converting().takes(grad) for idx, grad in arrived.items()
        )

    def without_grad(self, examples: Row[PrimalIdx, torch.Tensor]) -> list[PrimalIdx]:
        """Inputs that require grad and get no gradient, if others get one."""
        grads = self.backward.grads
        if all(recipe is None for recipe in grads):
            return []
        return [idx for idx, grad in grads.enumerate() if grad is None and examples[idx].requires_grad]

    def with_siblings(self) -> list[NodeOutIdx]:
        """The differentiable results that the caller gets, if there are several."""
        outs = self.differentiable()
        return [idx for idx in outs if self.outs[idx].slot.role == "output"] if len(outs) > 1 else []

    def differentiable(self) -> list[NodeOutIdx]:
        """Outputs that gradients can come back for."""
        return [idx for idx, out in self.outs.enumerate() if out.differentiable]


def node_plan(
    traced: Traced,
    plans: Plans,
    whole: Graph,
    split: Split,
    tangent_strides: Mapping[Slot, Strides],
    *,
    has_other_kinds: bool,
) -> NodePlan:
    """The plan of the node for a partitioned program.

    Args:
        traced: program and facts.
        plans: of the convention layers.
        whole: the backward of all results.
        split: the two graphs.
        tangent_strides: strides of tangents that backward graphs are compiled for.
        has_other_kinds: see `NodePlan.other_kinds`.
    """
    facts, backward = traced.facts, traced.facts.backward
    outs = Row[NodeOutIdx, NodeOut](list(facts.node_outs)[: len(plans.inside.unwrap.outs)])
    plain, later = is_plain(facts), traced.later_backwards
    as_they_are = later is not None and later.meets_other_layouts()
    return NodePlan(
        inside=plans.inside,
        outs=outs,
        sizes=split.forward.sizes(),
        backward_sizes=split.backward.sizes(),
        saved=_saved(traced, plans, split, outs),
        kept_inputs=_kept_inputs(traced, split),
        tangents=tuple(
            _tangent(out, tangent_strides, plain=plain, as_it_is=as_they_are)
            for out in outs
            if out.differentiable
        ),
        backward=backward,
        shares=_shares(backward.grads, whole),
        other_kinds=has_other_kinds,
        backward_writes=_backward_writes(facts, traced.program.ins, split),
        totals=_totals(backward.waypoints, any_strides=not tangent_strides, plain=plain),
        views=result_views(split.forward),
    )


def _shares(grads: Row[PrimalIdx, Recipe | None], backward: Graph) -> bool:
    """Whether gradients that are wrappers contain the same tensors, or arguments of the backward."""
    results, inside = iter(backward.results()), list[torch.fx.Node]()
    for recipe in grads:
        nodes = [] if recipe is None else [next(results) for _ in leaves(recipe)]
        inside += [node for node in nodes if node is not None and isinstance(recipe, Wrapper)]
    return len(set(inside)) < len(inside) or any(node.op == "placeholder" for node in inside)


def _saved(traced: Traced, plans: Plans, split: Split, outs: Row[NodeOutIdx, NodeOut]) -> Saved:
    facts = traced.facts
    position = {slot: idx for idx, slot in enumerate(traced.plain_ins())}
    result = {slot: idx for idx, slot in enumerate(split.forward.outs)}
    plains = plain_positions(facts.recipes)
    changing = {plain for idx in facts.reshaped() for plain in plains[idx]}
    num_inputs = len(split.saved_primals)
    inputs = [PlainIdx(position[split.saved_primals[slot]]) for slot in split.saved[:num_inputs]]
    wrappers = SavedWrappers.of(facts, plans, split, traced.program.ins, outs)
    return Saved(
        inputs=tuple((plain, plain in changing) for plain in inputs),
        results=tuple(result[slot] for slot in split.saved[num_inputs:]),
        slots=split.saved,
        wrappers=wrappers,
        frees=bool(facts.backward.freed or split.saved),
    )


def _backward_writes(facts: Facts, ins: Row[PrimalIdx, Slot], split: Split) -> BackwardWrites:
    backward, plains = facts.backward, plain_positions(facts.recipes)
    written = [
        (idx, plain, Slot("buffer", ins[idx].path, inner))
        for idx in backward.writes
        for plain, (inner, _) in zip(plains[idx], leaves(facts.recipes[idx]), strict=True)
    ]
    names = [slot for _, _, slot in written]
    counts = backward.writes
    wrappers = {idx: count for idx, count in counts.items() if isinstance(facts.recipes[idx], Wrapper)}
    return BackwardWrites(
        plains=tuple(plain for _, plain, _ in written),
        bumps=tuple(0 if idx in wrappers else counts[idx] for idx, _, _ in written),
        wrappers=tuple(wrappers.items()),
        read={slot: names.index(slot) for slot in split.backward.ins if slot.role == "buffer"},
    )


def is_plain(facts: Facts) -> bool:
    """Whether all inputs and outputs are plain tensors, so that its operators can run on wrappers instead."""
    recipes = (*facts.recipes, *(out.recipe for out in facts.node_outs))
    return all(isinstance(recipe, Plain) for recipe in recipes)


def _totals(
    waypoints: Sequence[ObservedGrad], *, any_strides: bool, plain: bool
) -> dict[NodeOutIdx, Tangent]:
    """The tangents that are assumed for waypoints that the node returns."""
    found: dict[NodeOutIdx, Tangent] = {}
    for waypoint in waypoints:
        if waypoint.total is not None and waypoint.value is not None:
            strides = tuple(None if any_strides else plain.stride for _, plain in leaves(waypoint.total))
            found[waypoint.value] = Tangent(waypoint.path, waypoint.total, strides, plain, "total")
    return found


def _kept_inputs(traced: Traced, split: Split) -> KeptInputs:
    """The inputs that backwards through autograd's graph of the trace need: those that get a gradient.

    If the program changes the metadata of one of them, there are no such backwards.
    """
    ins, recipes = traced.program.ins, traced.facts.recipes
    kept = tuple(idx for idx, grad in traced.facts.backward.grads.enumerate() if grad is not None)
    if traced.later_backwards is None or not traced.facts.reshaped().isdisjoint(kept):
        kept = ()
    slots = [tuple(Slot("primal", ins[idx].path, inner) for inner, _ in leaves(recipes[idx])) for idx in kept]
    saved = set(split.saved_primals.values())
    unsaved = [(k, inside) for k, inside in enumerate(slots) if not saved.issuperset(inside)]
    return KeptInputs(kept, tuple(itertools.chain(*slots)), tuple(unsaved))


def _tangent(out: NodeOut, strides: Mapping[Slot, Strides], *, plain: bool, as_it_is: bool) -> Tangent:
    recipe = tangent_recipe(out.recipe)
    slots = [Slot("tangent", out.slot.path, inner) for inner, _ in leaves(recipe)]
    return Tangent(out.slot.path, recipe, tuple(map(strides.get, slots)), plain, as_it_is=as_it_is)


def result_views(graph: Graph) -> frozenset[int]:
    """Positions of the results of a graph that are views of its temporaries, or the same tensor twice.

    They must be detached. A tensor that the user's program wrote in place is a view after functionalisation,
    and autograd must not take it for a view made inside a node. And a compiler may drop a view that changes
    nothing, so that one tensor is two results, which a node would return both as differentiable, or neither.
    Tensors inside wrappers are not returned themselves, so they may be the same (offsets of jagged tensors).
    """
    first: dict[Node | None, int] = {}
    return frozenset(
        position
        for position, (slot, node) in enumerate(zip(graph.outs, graph.results(), strict=True))
        if node is not None
        and (is_view(node) or (not slot.inner and first.setdefault(node, position) != position))
    )


def _saved_memory(split: Split) -> set[torch.fx.Node]:
    """The nodes of the forward graph that own the memory of the saved values."""
    results = dict(zip(split.forward.outs, split.forward.results(), strict=True))
    inputs = split.forward.named_placeholders()
    found = (
        inputs[split.saved_primals[slot]] if slot in split.saved_primals else results[slot]
        for slot in split.saved
    )
    return {view_base(node) for node in found if node is not None}


def _wrapped(
    split: Split, outs: Row[NodeOutIdx, NodeOut]
) -> Iterator[tuple[NodeOutIdx, list[torch.fx.Node]]]:
    """The wrappers that the node returns to the user, each with the nodes that own its memory."""
    results = iter(split.forward.results())
    for idx, out in outs.enumerate():
        nodes = [next(results) for _ in leaves(out.recipe)]
        if isinstance(out.recipe, Wrapper) and out.slot.role == "output":
            yield idx, [view_base(node) for node in nodes if node is not None]
