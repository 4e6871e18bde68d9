"""Backwards that a program may need beside its own, each compiled when it is first asked for.

Nothing here holds a tensor of the call that the program was compiled for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from aotdist.capture.alone import alone
from aotdist.codegen.contract import BoxedCall
from aotdist.codegen.emit import EmittedHalves, Emitter
from aotdist.facts import Facts
from aotdist.joint.later_backwards import OtherJoint
from aotdist.joint.symbols import Symbols
from aotdist.partition.choices import choice_without
from aotdist.partition.from_saved import from_saved
from aotdist.partition.gates import linked, part, parts_of
from aotdist.partition.reduced import besides_the_loss, without_tangents
from aotdist.partition.returning import returning
from aotdist.passes.run import run_passes
from aotdist.program import GRADIENT_ROLES, Graph, PrimalIdx, Row, Slot, TrainingGraphs
from aotdist.runtime.anomaly import pointing_at_the_forward
from aotdist.runtime.backward import Part
from aotdist.runtime.other_kinds import Arrived, NamedCall, OtherBackward
from aotdist.runtime.plan import is_plain
from aotdist.runtime.tangent import tangent_like
from aotdist.sizes import Expression, evaluate
from aotdist.subclasses.protocol import is_wrapper
from aotdist.torch_seam.modes import users_modes_off


def compiled_ahead(whole: Graph, facts: Facts, emitter: Emitter) -> Graph:
    """The backward to compile with the forward: of the one scalar among the results, if there is one.

    That is the loss, and a training step differentiates nothing else. The backward is that of all results
    where the backend makes the cut, where the results are gradients themselves, and where the backward of
    some of them is traced by itself.
    """
    traced = facts.backward.choices or facts.backward.adds_layouts
    if emitter.backend.owns_cut or facts.related or traced:
        return whole
    others = besides_the_loss(whole)
    return without_tangents(whole, others, any_strides=emitter.takes_any_strides(whole)) if others else whole


Guard: TypeAlias = Callable[[BoxedCall, Graph], BoxedCall]
"""Puts what every run of a backward stands in around its call, given its graph; once for each backward."""


def _as_it_is(call: BoxedCall, _: Graph) -> BoxedCall:
    return call


@dataclass(frozen=True)
class OnDemand:
    """The backwards of one program: the one that was compiled ahead, and others, each once.

    Args:
        graphs: its graphs.
        halves: forward and backward, compiled.
        facts: what the trace showed.
        ins: names of the inputs.
        symbols: the symbolic sizes.
        emitter: compiles graphs.
        kept: the plain inputs that are there besides saved values.
        traced: traces a backward for gradients of other kinds, if there can be one.
        guarded: what stands around each of them.
    """

    graphs: TrainingGraphs
    halves: EmittedHalves
    facts: Facts
    ins: Row[PrimalIdx, Slot]
    symbols: Symbols
    emitter: Emitter
    kept: Sequence[Slot] = ()
    traced: Callable[[Arrived], OtherJoint] | None = None
    guarded: Guard = _as_it_is
    _reduced: dict[frozenset[Slot], BoxedCall] = field(init=False, default_factory=dict)
    _parts: dict[Any, Part] = field(init=False, default_factory=dict)
    _others: list[OtherBackward] = field(init=False, default_factory=list)

    def with_guard(self, guarded: Guard) -> OnDemand:
        """The same, with something around each backward."""
        return replace(self, guarded=guarded)

    def of_all(self) -> BoxedCall:
        """The backward of all results, which is compiled at its first call if another was ahead."""
        none = frozenset[Slot]()
        return (lambda args: self.reduced(none)(args)) if self._left_out else self.reduced(none)

    def reduced(self, missing: frozenset[Slot]) -> BoxedCall:
        """The backward without the tangents `missing`."""
        if missing not in self._reduced:
            self._reduced[missing] = self._reduce(missing)
        return self._reduced[missing]

    @alone
    def _reduce(self, missing: frozenset[Slot]) -> BoxedCall:
        if missing == self._left_out:
            return self._called(self.halves.backward.call, self.graphs.split.backward)
        choice, graphs = choice_without(self.facts, missing), self.graphs
        with users_modes_off():
            if choice is None:
                return self._compiled(without_tangents(graphs.whole, missing, any_strides=self._loose))
            slots = choice.slots(self.ins, self.facts.recipes)
            if self.emitter.backend.owns_cut:
                some = self._not_cut(linked(graphs.cut), slots, missing)
                return _picking(self._compiled(some), some.ins, self._given(missing))
            some = returning(graphs.by_choice, slots)
            return self._compiled(without_tangents(some, missing, any_strides=self._loose))

    def _given(self, missing: frozenset[Slot]) -> list[Slot]:
        """What a backward is given without the tangents `missing`, in order."""
        return [slot for slot in self.graphs.whole.ins if slot not in missing]

    def parts(self, outs: tuple[Slot, ...], arrived: frozenset[Slot]) -> Part:
        """What computes some results of the backward, cut at its waypoints, from some gradients."""
        key = (outs, arrived)
        if key not in self._parts:
            self._parts[key] = self._make_part(outs, arrived)
        return self._parts[key]

    @alone
    def _make_part(self, outs: tuple[Slot, ...], arrived: frozenset[Slot]) -> Part:
        with users_modes_off():
            graph = self._part(outs, arrived)
            position = {slot: at for at, slot in enumerate(self.graphs.split.saved)}
            sources = tuple(position.get(slot, slot) for slot in graph.ins)
            return Part(self._compiled(graph), sources)

    def _part(self, outs: tuple[Slot, ...], arrived: frozenset[Slot]) -> Graph:
        if self.emitter.backend.owns_cut:
            gradients = (slot for slot in self.graphs.cut.ins if slot.role in GRADIENT_ROLES)
            return self._not_cut(self.graphs.cut, outs, frozenset(gradients) - arrived)
        return part(self._in_parts, outs, arrived, any_strides=self._loose)

    def _not_cut(self, recorded: Graph, outs: Sequence[Slot], missing: frozenset[Slot]) -> Graph:
        """Results of the backward as the trace recorded it, from what a cut of somebody else's saves."""
        graph = from_saved(returning(recorded, outs), self.graphs.joint, self.graphs.split, self.kept)
        return without_tangents(graph, missing, any_strides=self._loose)

    def of_other_kinds(self, arrived: Arrived) -> OtherBackward:
        """The backward for gradients of other kinds than the results, which there has to be: see `traced`."""
        found = next((one for one in self._others if one.takes(arrived)), None)
        if found is None:
            found = self._trace(arrived)
            self._others.append(found)
        return found

    @alone
    def _trace(self, arrived: Arrived) -> OtherBackward:
        assert self.traced is not None, "who asks has looked"
        with users_modes_off():
            return self._of_kinds(self.traced(arrived))

    def _of_kinds(self, joint: OtherJoint) -> OtherBackward:
        graph = from_saved(joint.graph, self.graphs.joint, self.graphs.split, self.kept)
        loose = self.emitter.takes_any_strides(graph)
        return OtherBackward(
            tangents={idx: tangent_like(*kind, loose=loose) for idx, kind in joint.tangents.items()},
            whole=NamedCall(self._compiled(graph), graph.ins),
            grads=joint.grads,
            kept=joint.kept,
        )

    def _for_any_kind(self, graph: Graph, call: BoxedCall) -> BoxedCall:
        """`call`, which computes `graph`, so that wrappers may come in the place of plain gradients."""
        if self.emitter.backend.any_tangents or not is_plain(self.facts):
            return call
        places = [k for k, slot in enumerate(graph.ins) if slot.role in GRADIENT_ROLES]
        on_wrappers = functools.cache(lambda: self.emitter.reference_backward(graph).call)

        def chosen(args: list[Any]) -> Sequence[Any]:
            return (on_wrappers() if any(is_wrapper(args[k]) for k in places) else call)(args)

        return chosen

    @functools.cached_property
    def _left_out(self) -> frozenset[Slot]:
        """The tangents that the backward compiled ahead does not take."""
        return frozenset(self.graphs.whole.ins).difference(self.graphs.split.backward.ins)

    @functools.cached_property
    def _in_parts(self) -> Graph:
        return parts_of(self.graphs.cut, self.graphs.split)

    @property
    def _loose(self) -> bool:
        return not self.halves.tangent_strides

    def _compiled(self, backward: Graph) -> BoxedCall:
        graph, _ = run_passes(backward, "backward", self.emitter.settings)
        before = self.symbols.sizes().guards
        call = self.emitter.another_backward(self.graphs.split, self.halves, graph).call
        added = [guard for guard in self.symbols.sizes().guards if guard not in before]
        if added:
            call = _where(added, graph, call, self.emitter.reference_backward(graph).call)
        called = self._called(call, graph)
        graph.pack()
        return called

    def _called(self, call: BoxedCall, graph: Graph) -> BoxedCall:
        return self.guarded(pointing_at_the_forward(self._for_any_kind(graph, call), graph), graph)


def _picking(call: BoxedCall, ins: Sequence[Slot], given: Sequence[Slot]) -> BoxedCall:
    """`call`, which takes `ins`, as one that is given more."""
    position = {slot: k for k, slot in enumerate(given)}

    def picking(args: list[Any]) -> Sequence[Any]:
        taken = [args[position[slot]] for slot in ins]
        args.clear()
        return call(taken)

    return picking


def _where(guards: Sequence[Expression], graph: Graph, call: BoxedCall, otherwise: BoxedCall) -> BoxedCall:
    """`call` for sizes that pass guards which nothing has tested, `otherwise` for all others."""
    places = {slot.path: k for k, slot in enumerate(graph.ins) if slot.role == "size"}

    def chosen(args: list[Any]) -> Sequence[Any]:
        symbols = {name: args[place] for name, place in places.items() if name.isidentifier()}
        return (call if all(evaluate(guard, symbols) for guard in guards) else otherwise)(args)

    return chosen
