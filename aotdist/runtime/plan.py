"""How tensors pass through the autograd node: its plan."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.fx import Node

from aotdist.codegen.contract import Strides
from aotdist.convention.stack import InsidePlans, Plans
from aotdist.convention.subclass import plain_positions
from aotdist.facts import Facts, NodeOut, ObservedGrad
from aotdist.partition.traits import is_view
from aotdist.program import Graph, NodeOutIdx, PlainIdx, PrimalIdx, Row, Slot, Split
from aotdist.runtime.tangent import Tangent
from aotdist.runtime.wrappers import SavedWrappers
from aotdist.sizes import Expression
from aotdist.subclasses.protocol import Plain, Recipe, Wrapper, leaves, tangent_recipe
from aotdist.trace.trace import Traced

Grads: TypeAlias = "Mapping[NodeOutIdx, torch.Tensor | None]"
"""Gradients of results; None for those that did not arrive."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What the node saves for the backward graph: plain inputs, then results of the forward graph.

    Args:
        inputs: which inputs; for each, whether the program reshapes it, or moves it to other memory, before
            the backward.
        results: positions of the results.
        slots: the names of all of them.
        wrappers: the wrappers that saved values lie in.
        freed: see `BackwardFacts.freed`.
        frees: whether there is only one backward of some results; if not, nothing is saved.
    """

    inputs: tuple[tuple[PlainIdx, bool], ...]
    results: tuple[int, ...]
    slots: tuple[Slot, ...]
    wrappers: SavedWrappers
    freed: frozenset[frozenset[NodeOutIdx]]
    frees: bool


@dataclass(frozen=True, slots=True)
class KeptInputs:
    """The inputs that the node keeps, for gradients with a history and for those of other kinds.

    Args:
        primals: the inputs.
        slots: the names of the plain tensors beneath them.
        unsaved: those that are not also saved by autograd, which then does not notice if they are written:
            positions in `primals`, and names of the plain tensors beneath.
    """

    primals: tuple[PrimalIdx, ...]
    slots: tuple[Slot, ...]
    unsaved: tuple[tuple[int, tuple[Slot, ...]], ...]


@dataclass(frozen=True, slots=True)
class BackwardWrites:
    """What the backward writes of the inputs.

    Args:
        plains: plain inputs; their new values follow the gradients.
        inputs: for each of `plains`, the input that it lies in.
        counts: how many writes of each input to count, in a backward of all results.
        wrappers: those of these inputs that are wrappers, and whose own counters count.
        read: arguments of the backward graph, after the tangents, that are inputs as they are when it runs:
            for each, its position in `plains`.
        once: see `BackwardFacts.once`.
    """

    plains: tuple[PlainIdx, ...]
    inputs: tuple[PrimalIdx, ...]
    counts: Mapping[PrimalIdx, int]
    wrappers: tuple[PrimalIdx, ...]
    read: Mapping[Slot, int]
    once: bool

    def bumps(self, counts: Mapping[PrimalIdx, int]) -> list[int]:
        """How many writes of each plain input to count itself, in a backward with such counts."""
        return [0 if idx in self.wrappers else counts.get(idx, 0) for idx in self.inputs]


@dataclass(frozen=True, slots=True)
class Variants:
    """Where the backward of a request is another than a part of the whole one.

    Args:
        of_results: the outputs whose backward was traced separately, with the writes that it counts.
        of_kinds: whether gradients of other kinds than the results have a backward of their own.
        of_layouts: whether the backward of some outputs may be more than a part of the whole, see `Facts`.
    """

    of_results: Mapping[tuple[NodeOutIdx, ...], Mapping[PrimalIdx, int]]
    of_kinds: bool
    of_layouts: bool


@dataclass(frozen=True, slots=True)
class NodePlan:
    """How tensors pass through the node.

    Args:
        inside: what is done around the forward graph.
        outs: what the node returns; what `inside` writes has been dropped.
        sizes: the numbers that the forward graph takes after its plain inputs.
        backward_sizes: those that the backward graph takes between saved values and tangents.
        saved: what it saves.
        kept_inputs: the inputs that it keeps.
        tangents: recipes of the tangents to assume, one for each differentiable output.
        grads: recipe of each input's gradient, or None.
        shares: whether gradients that are wrappers may be one, or be tangents: they hold the same tensors.
        variants: other backwards than parts of the whole one.
        backward_writes: what the backward writes.
        has_waypoints: whether gradients pass tensors that the caller holds.
        totals: recipes to assume for the sums of gradients at waypoints that the node returns.
        views: forward results that are made as views, see `result_views`.
    """

    inside: InsidePlans
    outs: Row[NodeOutIdx, NodeOut]
    sizes: tuple[Expression, ...]
    backward_sizes: tuple[Expression, ...]
    saved: Saved
    kept_inputs: KeptInputs
    tangents: tuple[Tangent, ...]
    grads: Row[PrimalIdx, Recipe | None]
    shares: bool
    variants: Variants
    backward_writes: BackwardWrites
    has_waypoints: bool
    totals: Mapping[NodeOutIdx, Tangent]
    views: frozenset[int]

    def expected(self, idx: NodeOutIdx, *, in_parts: bool) -> Tangent:
        """The recipe that is assumed for the gradient of an output."""
        if in_parts and idx in self.totals:
            return self.totals[idx]
        return self.tangents[self.differentiable().index(idx)]

    def takes(self, arrived: Mapping[NodeOutIdx, torch.Tensor]) -> bool:
        """Whether the backward is for gradients of these kinds."""
        return all(self.expected(idx, in_parts=False).takes(grad) for idx, grad in arrived.items())

    def converts(self, arrived: Mapping[NodeOutIdx, torch.Tensor]) -> bool:
        """Whether the backward is for such gradients, or they can be converted."""
        return all(
            self.expected(idx, in_parts=False).converting().takes(grad) for idx, grad in arrived.items()
        )

    def without_grad(self, examples: Row[PrimalIdx, torch.Tensor]) -> list[PrimalIdx]:
        """Inputs that require grad and get no gradient, if others get one."""
        if all(recipe is None for recipe in self.grads):
            return []
        return [idx for idx, grad in self.grads.enumerate() if grad is None and examples[idx].requires_grad]

    def with_siblings(self) -> list[NodeOutIdx]:
        """Differentiable results that the caller gets, if there are several: each has hooks of its own."""
        found = self.differentiable()
        return [idx for idx in found if self.outs[idx].slot.role == "output"] if len(found) > 1 else []

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
        has_other_kinds: see `Variants.of_kinds`.
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
        grads=backward.grads,
        shares=_shares(backward.grads, whole),
        variants=Variants(
            {choice.outs: choice.writes for choice in backward.choices},
            of_kinds=has_other_kinds,
            of_layouts=backward.adds_layouts,
        ),
        backward_writes=_backward_writes(facts, traced.program.ins, split),
        has_waypoints=bool(backward.waypoints),
        totals=_totals(backward.waypoints, any_strides=not tangent_strides, plain=plain),
        views=result_views(split.forward),
    )


def _shares(grads: Row[PrimalIdx, Recipe | None], backward: Graph) -> bool:
    """Whether gradients that are wrappers hold the same tensors, or tensors that the backward is given."""
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
    freed = facts.backward.freed
    return Saved(
        inputs=tuple((plain, plain in changing) for plain in inputs),
        results=tuple(result[slot] for slot in split.saved[num_inputs:]),
        slots=split.saved,
        wrappers=wrappers,
        freed=freed,
        frees=bool(freed or split.saved),
    )


def _backward_writes(facts: Facts, ins: Row[PrimalIdx, Slot], split: Split) -> BackwardWrites:
    backward, plains = facts.backward, plain_positions(facts.recipes)
    written = [
        (idx, plain, Slot("buffer", ins[idx].path, inner))
        for idx in backward.writes
        for plain, (inner, _) in zip(plains[idx], leaves(facts.recipes[idx]), strict=True)
    ]
    names = [slot for _, _, slot in written]
    return BackwardWrites(
        plains=tuple(plain for _, plain, _ in written),
        inputs=tuple(idx for idx, _, _ in written),
        counts=backward.writes,
        wrappers=tuple(idx for idx in backward.writes if isinstance(facts.recipes[idx], Wrapper)),
        read={slot: names.index(slot) for slot in split.backward.ins if slot.role == "buffer"},
        once=backward.once,
    )


def is_plain(facts: Facts) -> bool:
    """Whether a program works on plain tensors alone, so that wrappers can pass its backward."""
    recipes = (*facts.recipes, *(out.recipe for out in facts.node_outs))
    return all(isinstance(recipe, Plain) for recipe in recipes)


def _totals(
    waypoints: Sequence[ObservedGrad], *, any_strides: bool, plain: bool
) -> dict[NodeOutIdx, Tangent]:
    """The recipes that are assumed for the gradients of waypoints that the node returns."""
    found: dict[NodeOutIdx, Tangent] = {}
    for waypoint in waypoints:
        if waypoint.total is not None and waypoint.value is not None:
            strides = tuple(None if any_strides else plain.stride for _, plain in leaves(waypoint.total))
            found[waypoint.value] = Tangent(waypoint.path, waypoint.total, strides, plain, "total")
    return found


def _kept_inputs(traced: Traced, split: Split) -> KeptInputs:
    """The inputs that backwards through the trace's graph need: those that get a gradient.

    There are none of these backwards where such an input shows its elements in another way afterwards.
    """
    ins, recipes = traced.program.ins, traced.facts.recipes
    kept = tuple(idx for idx, grad in traced.facts.backward.grads.enumerate() if grad is not None)
    if traced.later_backwards is None or not traced.facts.reshaped().isdisjoint(kept):
        kept = ()
    slots = [tuple(Slot("primal", ins[idx].path, inner) for inner, _ in leaves(recipes[idx])) for idx in kept]
    saved = set(split.saved_primals.values())
    unsaved = [(k, beneath) for k, beneath in enumerate(slots) if not saved.issuperset(beneath)]
    return KeptInputs(kept, tuple(itertools.chain(*slots)), tuple(unsaved))


def _tangent(out: NodeOut, strides: Mapping[Slot, Strides], *, plain: bool, as_it_is: bool) -> Tangent:
    recipe = tangent_recipe(out.recipe)
    slots = [Slot("tangent", out.slot.path, inner) for inner, _ in leaves(recipe)]
    return Tangent(out.slot.path, recipe, tuple(map(strides.get, slots)), plain, as_it_is=as_it_is)


def result_views(graph: Graph) -> frozenset[int]:
    """Positions of the results that a graph makes as views of temporaries of its own.

    They must be detached. What was a tensor of its own in the user's program, written in place and then
    functionalised, must not be known to autograd as a view that was made inside of a node. And a compiler
    may have dropped a view that changes nothing, so that one tensor is two results: a node would return
    both as differentiable, or neither. What lies in a wrapper is not returned itself: there it may be the
    same tensor twice, as offsets of jagged tensors are.
    """
    first: dict[Node | None, int] = {}
    return frozenset(
        position
        for position, (slot, node) in enumerate(zip(graph.outs, graph.results(), strict=True))
        if node is not None
        and (is_view(node) or (not slot.inner and first.setdefault(node, position) != position))
    )


def saved_beside(value: torch.Tensor) -> torch.Tensor:
    """A value to save, where version counters are set: autograd refuses views from before that."""
    return value.detach() if value._is_view() else value  # pyright: ignore[reportPrivateUsage]
