"""Every backward of a program is `derive(joint, request)`.

A trace gives one joint graph, whose second half is the backward of all results. The others are derived on
request, and compiled and cached under the request (`aotdist.runtime.backwards`):

- of some results: a backward is linear in its tangents, so the others are left out (`reduced`); where it is
  not linear, autograd ran for that choice of results during the trace, and its gradients are further results;
- in parts, while hooks watch gradients between results: the joint graph is cut there (`gates`);
- for tangents of another kind than the results, and with `create_graph=True`: autograd runs through its graph
  of the trace again (`aotdist.trace.later_backwards`).

All of them start from what the forward saves (`from_saved`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aotdist.errors import UnsupportedProgram
from aotdist.facts import Facts
from aotdist.partition.builder import returning
from aotdist.partition.gates import Gate, linked, parts_of
from aotdist.partition.other_backwards import from_saved, without_tangents
from aotdist.program import GRADIENT_ROLES, Graph, NodeOutIdx, PrimalIdx, Row, Slot, Split
from aotdist.subclasses.protocol import Recipe, leaves, tangent_recipe
from aotdist.trace.later_backwards import Derived, TracedDoubleBackward
from aotdist.trace.trace import Traced, Traces


@dataclass(frozen=True, slots=True)
class BackwardRequest:
    """Which backward of a program to run.

    Args:
        results: the results whose tangents arrived, in order.
        kinds: recipes of these tangents, if they are not the ones that the trace assumed.
        create_graph: whether the gradients are to have a history.
        recorded: with `create_graph`, the results whose tangents have a history.
        watched: whether it runs in parts: the tangent of a waypoint is then its whole gradient.
        gate: the gate whose pieces to compute; None for the gradients of inputs.
    """

    results: tuple[NodeOutIdx, ...]
    kinds: tuple[Recipe, ...] = ()
    create_graph: bool = False
    recorded: tuple[NodeOutIdx, ...] = ()
    watched: bool = False
    gate: Gate | None = None


@dataclass(frozen=True, slots=True)
class Joint:
    """What all backwards of a program are derived from.

    Args:
        cut: the joint graph, cut at its waypoints.
        graph: the joint graph, not cut.
        by_choice: the backward, with the results of every choice that was traced separately.
        whole: the backward of all results.
        split: the partition of `graph`; its backward is that of `compiled_ahead`, once this is known.
        facts: what the trace showed.
        ins: names of the inputs.
        kept_inputs: names of the plain inputs that are there in the backward besides saved values.
        any_strides: whether backwards take tangents of any strides.
        is_cut_by_backend: whether the backend partitions: it then compiles the backward of all results only,
            and the others are made of the graph that was recorded.
        traces: runs backwards through autograd's graph of the trace, if possible.
        lacks: the reason if not: the end of a sentence.
    """

    cut: Graph
    graph: Graph
    by_choice: Graph
    whole: Graph
    split: Split
    facts: Facts
    ins: Row[PrimalIdx, Slot]
    kept_inputs: Sequence[Slot] = ()
    any_strides: bool = True
    is_cut_by_backend: bool = False
    traces: Traces | None = None
    lacks: str = "the trace cannot run its backward again"

    @classmethod
    def of(
        cls, traced: Traced, cut: Graph, graph: Graph, split: Split, *, is_cut_by_backend: bool = False
    ) -> Joint:
        """From a joint graph that was partitioned.

        Args:
            traced: the program.
            cut: its graph, cut at its waypoints.
            graph: the same, not cut.
            split: its halves; the backward has the results of all choices.
            is_cut_by_backend: see above.
        """
        ins, facts, later = traced.program.ins, traced.facts, traced.later_backwards
        traces = Traces(later) if traced.traces is None and later is not None else traced.traces
        graphs = cut, graph, split.backward, without_choices(split.backward, facts, ins)
        return cls(*graphs, split, facts, ins, is_cut_by_backend=is_cut_by_backend, traces=traces)

    def all_results(self) -> tuple[NodeOutIdx, ...]:
        """The differentiable results."""
        return tuple(idx for idx, out in self.facts.node_outs.enumerate() if out.differentiable)


def compiled_ahead(joint: Joint) -> BackwardRequest:
    """The backward to compile with the forward: that of the only scalar among the results, if there is one.

    It is the loss, and a training step differentiates nothing else. Otherwise, and where the backend
    partitions, where results are gradients themselves, and where the backward of some results was traced
    separately, it is the backward of all results.
    """
    facts, named = joint.facts, joint.whole.named_placeholders()
    whole = BackwardRequest(joint.all_results())
    if joint.is_cut_by_backend or facts.related or facts.backward.choices or facts.backward.adds_layouts:
        return whole
    tangents = ((slot, node.meta["val"]) for slot, node in named.items() if slot.role == "tangent")
    scalars = {slot.path for slot, val in tangents if val.dim() == 0}
    losses = tuple(idx for idx in whole.results if facts.node_outs[idx].slot.path in scalars)
    return BackwardRequest(losses) if len(losses) == 1 else whole


def derive(joint: Joint, request: BackwardRequest) -> Derived:
    """The graph of a backward without `create_graph`.

    Args:
        joint: the program.
        request: which of its backwards.

    Raises:
        UnsupportedProgram: there is no such backward, or it needs a value that was not saved.
    """
    if request.kinds:
        return _of_kinds(joint, request)
    return _in_parts(joint, request) if request.watched else _in_one_go(joint, request)


def _of_kinds(joint: Joint, request: BackwardRequest) -> Derived:
    if joint.traces is None:
        raise _no_trace(joint, "gradients of other kinds than the results")
    traced = joint.traces.get().of_kinds(dict(zip(request.results, request.kinds, strict=True)))
    graph = from_saved(traced.graph, joint.graph, joint.split, joint.kept_inputs)
    return replace(traced, graph=graph)


def derive_double(joint: Joint, request: BackwardRequest) -> TracedDoubleBackward:
    """The backward with `create_graph`, as a program.

    Raises:
        UnsupportedProgram: the gradients cannot be differentiated.
    """
    traces = joint.traces
    if traces is None or not joint.kept_inputs:
        raise _no_trace(joint, "gradients of gradients (`create_graph=True`)")
    traced = traces.get().differentiable(
        dict(zip(request.results, request.kinds, strict=True)),
        request.recorded,
        watched=request.watched,
        pieces=() if request.gate is None else request.gate.pieces,
    )
    outs, first = {out.slot.path for out in traced.facts.node_outs}, traced.plain_ins()
    tangents = [slot for slot in traced.graph.ins if slot.role == "tangent" and slot.path in outs]
    if not traced.has_history:
        return traced
    graph = from_saved(traced.graph, joint.graph, joint.split, joint.kept_inputs, first, tangents)
    return replace(traced, graph=graph)


def _in_one_go(joint: Joint, request: BackwardRequest) -> Derived:
    choices = (choice for choice in joint.facts.backward.choices if choice.outs == request.results)
    choice = next(choices, None)
    returned = joint.facts.backward.grads
    if choice is None:
        return Derived(_without_others(joint, joint.whole, request), returned, {})
    slots = choice.slots(joint.ins)
    some = _recorded(joint, linked(joint.cut), slots) if joint.is_cut_by_backend else None
    some = returning(joint.by_choice, slots) if some is None else some
    returned = Row[PrimalIdx, "Recipe | None"](map(choice.grads.get, returned.indices()))
    return Derived(_without_others(joint, some, request), returned, {}, choice.kept)


def _in_parts(joint: Joint, request: BackwardRequest) -> Derived:
    gate, backward = request.gate, joint.facts.backward
    points = backward.waypoints
    asked = () if gate is None else tuple((points[position], k) for position, k in gate.pieces)
    outs = [slot for point, k in asked for slot in point.piece_slots(k)] if asked else joint.whole.outs
    if joint.is_cut_by_backend:
        graph = _recorded(joint, joint.cut, outs)
    else:
        graph = returning(parts_of(joint.cut, joint.split), outs)
    returned = backward.grads if gate is None else tuple(point.pieces[k] for point, k in asked)
    return Derived(_without_others(joint, graph, request), returned, {})


def _recorded(joint: Joint, recorded: Graph, outs: Sequence[Slot]) -> Graph:
    """Some results of the recorded backward, computed from the values that the backend's partition saves."""
    return from_saved(returning(recorded, outs), joint.graph, joint.split, joint.kept_inputs)


def _without_others(joint: Joint, graph: Graph, request: BackwardRequest) -> Graph:
    """`graph` without the tangents that the request does not bring."""
    arrived = gradients(joint.facts, request)
    missing = [slot for slot in graph.ins if slot.role in GRADIENT_ROLES and slot not in arrived]
    return without_tangents(graph, missing, any_strides=joint.any_strides) if missing else graph


def gradients(facts: Facts, request: BackwardRequest) -> frozenset[Slot]:
    """The names of the tangents that a backward takes, if they are of the kinds that the trace assumed."""
    points = facts.backward.waypoints if request.watched else ()
    totals = {point.value: point for point in points if point.total is not None}
    found: set[Slot] = set()
    for idx in request.results:
        out, point = facts.node_outs[idx], totals.get(idx)
        if point is not None and point.total is not None:
            found |= {Slot("total", point.path, inner) for inner, _ in leaves(point.total)}
        else:
            found |= {
                Slot("tangent", out.slot.path, inner) for inner, _ in leaves(tangent_recipe(out.recipe))
            }
    return frozenset(found)


def _no_trace(joint: Joint, what: str) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"the program asks for {what}, and {joint.lacks}",
        stage="partition",
        fix="compile it where it runs: `aotdist.compile`; or convert gradients before calling `backward`",
    )


def without_choices(backward: Graph, facts: Facts, ins: Row[PrimalIdx, Slot]) -> Graph:
    """`backward` without the results of choices that were traced separately; `ins` names the inputs."""
    of_choices = {slot for choice in facts.backward.choices for slot in choice.slots(ins)}
    if not of_choices:
        return backward
    return returning(backward, [slot for slot in backward.outs if slot not in of_choices])
