"""A compiled program with a backward: one is compiled with the forward, the others when they are requested.

`aotdist.runtime.derive` makes their graphs. Nothing here holds a tensor of the call that the program was
compiled for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch

from aotdist.capture.compile_lock import alone
from aotdist.codegen.contract import BoxedCall
from aotdist.codegen.emit import EmittedHalves, Emitter
from aotdist.convention.stack import Plans
from aotdist.passes.run import run_passes
from aotdist.program import GRADIENT_ROLES, Graph, NodeOutIdx
from aotdist.runtime.derive import BackwardRequest, Joint, derive, derive_double
from aotdist.runtime.double_backward import DoubleBackward
from aotdist.runtime.held import Arguments
from aotdist.runtime.plan import NodePlan, is_plain, node_plan
from aotdist.runtime.tangent import Tangent, tangent_like
from aotdist.subclasses.protocol import is_wrapper
from aotdist.torch_seam.modes import users_modes_off
from aotdist.trace.later_backwards import Derived, TracedDoubleBackward
from aotdist.trace.numbers.symbols import Symbols
from aotdist.trace.trace import Traced

Arrived: TypeAlias = Mapping[NodeOutIdx, torch.Tensor]
"""The tangents that arrived, by the output that they belong to."""

Guard: TypeAlias = Callable[[BoxedCall, Graph], BoxedCall]
"""Wraps the call of a backward graph in what surrounds each run of it; applied once to each graph."""


def _as_it_is(call: BoxedCall, _: Graph) -> BoxedCall:
    return call


@dataclass(frozen=True, slots=True)
class CompiledBackward:
    """A compiled backward.

    Args:
        call: runs its graph.
        arguments: where the arguments of the graph come from.
        tangents: how the tangent of each output is converted to arguments.
        derived: what it was compiled of.
        reads: positions of the saved values that it computes with.
    """

    call: BoxedCall
    arguments: Arguments
    tangents: Mapping[NodeOutIdx, Tangent]
    derived: Derived
    reads: tuple[int, ...]


B = TypeVar("B", "CompiledBackward", DoubleBackward)

DoubleBackwards: TypeAlias = Callable[[TracedDoubleBackward, NodePlan], DoubleBackward]
"""Compiles a backward that is differentiated itself, as a program with a backward."""


@dataclass(frozen=True)
class Training:
    """A compiled program with a backward.

    Args:
        joint: its graphs, and what its backwards are derived from.
        ahead: the request of the backward that was compiled with the forward.
        halves: the compiled forward, and that backward.
        node: how tensors pass through the autograd node.
        symbols: the symbolic sizes.
        emitter: compiles graphs.
        doubles: compiles backwards that are differentiated themselves.
        guarded: wraps the call of each backward.
    """

    joint: Joint
    ahead: BackwardRequest
    halves: EmittedHalves
    node: NodePlan
    symbols: Symbols
    emitter: Emitter
    doubles: DoubleBackwards
    guarded: Guard = _as_it_is
    _made: dict[tuple[BackwardRequest, bool], list[Any]] = field(init=False, default_factory=dict)

    @classmethod
    def of_halves(
        cls,
        traced: Traced,
        plans: Plans,
        joint: Joint,
        ahead: BackwardRequest,
        halves: EmittedHalves,
        emitter: Emitter,
        doubles: DoubleBackwards,
        *,
        has_other_kinds: bool,
    ) -> Training:
        """The program of two compiled halves."""
        strides = halves.tangent_strides
        node = node_plan(traced, plans, joint.whole, joint.split, strides, has_other_kinds=has_other_kinds)
        joint = replace(joint, kept_inputs=node.kept_inputs.slots, any_strides=not strides)
        return cls(joint, ahead, halves, node, traced.symbols, emitter, doubles)

    def has_trace(self) -> bool:
        """Whether autograd's graph of the trace is in memory."""
        return self.joint.traces is not None and self.joint.traces.is_there()

    def forget_trace(self) -> None:
        """Drop autograd's graph of the trace, if the program can be traced again."""
        if self.joint.traces is not None:
            self.joint.traces.forget()

    def used_trace(self) -> bool:
        """Whether a backward ran through autograd's graph of the trace, as with `create_graph`."""
        return self.joint.traces is not None and self.joint.traces.is_used

    def of_all(self) -> BoxedCall:
        """The backward of all results; compiled at its first call, unless it was compiled ahead."""
        request = BackwardRequest(self.joint.all_results())
        if request == self.ahead:
            return self.of(request, {}).call
        return lambda args: self.of(request, {}).call(args)

    def of(self, request: BackwardRequest, arrived: Arrived) -> CompiledBackward:
        """The backward for a request without `create_graph`, compiled if there is none for these tangents."""
        return self._cached(request, arrived, self._compile)

    def double(self, request: BackwardRequest, arrived: Arrived) -> DoubleBackward:
        """The backward for a request with `create_graph`, likewise."""
        return self._cached(request, arrived, self._compile_double)

    def _cached(
        self, request: BackwardRequest, arrived: Arrived, compiled: Callable[[BackwardRequest], B]
    ) -> B:
        # Tangents that differ in their strides alone need no other graph, so each backward is asked.
        def takes(backward: CompiledBackward | DoubleBackward) -> bool:
            return all(tangent.takes(arrived[idx]) for idx, tangent in backward.tangents.items())

        made = self._made.setdefault((replace(request, kinds=()), bool(request.kinds)), [])
        backward = next((one for one in made if not request.kinds or takes(one)), None)
        if backward is None:
            backward = compiled(request)
            made.append(backward)
        return backward

    @alone
    def _compile_double(self, request: BackwardRequest) -> DoubleBackward:
        with users_modes_off():
            return self.doubles(derive_double(self.joint, request), self.node)

    @alone
    def _compile(self, request: BackwardRequest) -> CompiledBackward:
        with users_modes_off():
            if request == self.ahead:
                graph = self.joint.split.backward
                derived = Derived(graph, self.joint.facts.backward.grads, {})
                call = self._called(self.halves.backward.call, graph)
            else:
                derived = derive(self.joint, request)
                graph = derived.graph
                call = self._compiled(graph)
        tangents = self._tangents(request, derived)
        names = [slot for tangent in tangents.values() for slot in tangent.slots()]
        arguments, used = Arguments.of(self.node, graph.ins, names), graph.named_placeholders()
        reads = (at for at, slot in enumerate(self.node.saved.slots) if slot in used and used[slot].users)
        return CompiledBackward(call, arguments, tangents, derived, tuple(reads))

    def _tangents(self, request: BackwardRequest, derived: Derived) -> dict[NodeOutIdx, Tangent]:
        if derived.tangents:
            loose = self.emitter.takes_any_strides(derived.graph)
            return {idx: tangent_like(*kind, loose=loose) for idx, kind in derived.tangents.items()}
        expected = ((idx, self.node.expected(idx, in_parts=request.watched)) for idx in request.results)
        return {idx: tangent.converting() for idx, tangent in expected}

    def _for_any_kind(self, graph: Graph, call: BoxedCall) -> BoxedCall:
        """`call`, or operator by operator where wrappers arrive as the tangents of plain tensors."""
        if self.emitter.backend.any_tangents or not is_plain(self.joint.facts):
            return call
        places = [k for k, slot in enumerate(graph.ins) if slot.role in GRADIENT_ROLES]
        reference = functools.cache(lambda: self.emitter.reference_backward(graph).call)

        def run(args: list[Any]) -> Sequence[Any]:
            return (reference() if any(is_wrapper(args[k]) for k in places) else call)(args)

        return run

    def _compiled(self, backward: Graph) -> BoxedCall:
        graph, _ = run_passes(backward, "backward", self.emitter.settings)
        before = self.symbols.sizes().guards
        emitted = self.emitter.another_backward(self.joint.split, self.halves, graph)
        if any(guard not in before for guard in self.symbols.sizes().guards):
            # It is for some sizes only, and the call has tested none of these guards.
            emitted = self.emitter.reference_backward(graph)
        return self._called(emitted.call, graph)

    def _called(self, call: BoxedCall, graph: Graph) -> BoxedCall:
        return self.guarded(self._for_any_kind(graph, call), graph)
