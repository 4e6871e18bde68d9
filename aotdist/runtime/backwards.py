"""The backwards of one program, each compiled under its request when it is first asked for.

What they are is said in one place, `aotdist.runtime.derive`. The one that was compiled ahead, for which the
node's code is printed, is just the first. Nothing here holds a tensor of the call that the program was
compiled for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.fx import Interpreter, Node

from aotdist.capture.compile_lock import alone
from aotdist.codegen.contract import BoxedCall
from aotdist.codegen.emit import EmittedHalves, Emitter
from aotdist.codegen.rewrites import takes_any_strides, with_reshapes
from aotdist.passes.run import run_passes
from aotdist.program import GRADIENT_ROLES, Graph, NodeOutIdx, PrimalIdx, Row
from aotdist.runtime.derive import BackwardRequest, Joint, derive, derive_double
from aotdist.runtime.double_backward import DoubleBackward
from aotdist.runtime.held import Arguments
from aotdist.runtime.plan import NodePlan, is_plain
from aotdist.runtime.tangent import Tangent, tangent_like
from aotdist.sizes import Expression, evaluate
from aotdist.subclasses.protocol import Recipe, is_wrapper
from aotdist.torch_seam.modes import users_modes_off
from aotdist.trace.later_backwards import Derived, TracedDoubleBackward
from aotdist.trace.numbers.symbols import Symbols

Arrived: TypeAlias = Mapping[NodeOutIdx, torch.Tensor]
"""The gradients that there are."""

Guard: TypeAlias = Callable[[BoxedCall, Graph], BoxedCall]
"""Puts what every run of a backward stands in around its call, given its graph; once for each backward."""


def _as_it_is(call: BoxedCall, _: Graph) -> BoxedCall:
    return call


@dataclass(frozen=True, slots=True)
class Compiled:
    """A backward, compiled.

    Args:
        call: its graph.
        arguments: where the arguments of the graph come from.
        tangents: how each gradient is given to it.
        returned: see `Derived`.
        kept: likewise.
        reads: positions of the saved values that it computes with.
    """

    call: BoxedCall
    arguments: Arguments
    tangents: Mapping[NodeOutIdx, Tangent]
    returned: Row[PrimalIdx, Recipe | None] | tuple[Recipe, ...]
    kept: tuple[Recipe, ...] | None
    reads: tuple[int, ...]


DoubleBackwards: TypeAlias = Callable[[TracedDoubleBackward, NodePlan], DoubleBackward]
"""Compiles what was derived for a request, as a program with a backward."""


@dataclass(frozen=True)
class Backwards:
    """The backwards of one program.

    Args:
        joint: what they are derived from.
        ahead: the one that was compiled with the forward.
        halves: forward and backward, compiled.
        node: how tensors pass through the node.
        symbols: the symbolic sizes.
        emitter: compiles graphs.
        doubles: compiles those whose gradients are differentiated in turn.
        guarded: what stands around each of them.
    """

    joint: Joint
    ahead: BackwardRequest
    halves: EmittedHalves
    node: NodePlan
    symbols: Symbols
    emitter: Emitter
    doubles: DoubleBackwards
    guarded: Guard = _as_it_is
    _made: dict[tuple[BackwardRequest, bool], list[Compiled | DoubleBackward]] = field(
        init=False, default_factory=dict
    )

    def has_trace(self) -> bool:
        """Whether autograd's graph of the trace is in memory."""
        return self.joint.traces is not None and self.joint.traces.is_there()

    def forget_trace(self) -> None:
        """Let go of autograd's graph of the trace, where the program can be traced anew."""
        if self.joint.traces is not None:
            self.joint.traces.forget()

    def of_all(self) -> BoxedCall:
        """The backward of all results, which is compiled at its first call if another was ahead."""
        request = BackwardRequest(self.joint.all_results())
        if request == self.ahead:
            return self.of(request, {}).call
        return lambda args: self.of(request, {}).call(args)

    def of(self, request: BackwardRequest, arrived: Arrived) -> Compiled:
        """The backward for a request, and for gradients of which it tells the kinds."""
        made = self._of(request, arrived)
        assert isinstance(made, Compiled), "its gradients are not differentiated in turn"
        return made

    def double(self, request: BackwardRequest, arrived: Arrived) -> DoubleBackward:
        """The same for gradients that are differentiated in turn."""
        made = self._of(request, arrived)
        assert isinstance(made, DoubleBackward), "its gradients are differentiated in turn"
        return made

    def _of(self, request: BackwardRequest, arrived: Arrived) -> Compiled | DoubleBackward:
        # Kinds are alike that one graph takes, whatever their strides: those that were made are asked.
        key = replace(request, kinds=()), bool(request.kinds)
        made = self._made.setdefault(key, [])
        found = next((one for one in made if not request.kinds or _takes(one, arrived)), None)
        if found is None:
            found = self._compile(request)
            made.append(found)
        return found

    @alone
    def _compile(self, request: BackwardRequest) -> Compiled | DoubleBackward:
        with users_modes_off():
            if request.create_graph:
                return self.doubles(derive_double(self.joint, request), self.node)
            if request == self.ahead:
                graph = self.joint.graphs.split.backward
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
        return Compiled(call, arguments, tangents, derived.returned, derived.kept, tuple(reads))

    def _tangents(self, request: BackwardRequest, derived: Derived) -> dict[NodeOutIdx, Tangent]:
        if derived.tangents:
            loose = self.emitter.takes_any_strides(derived.graph)
            return {idx: tangent_like(*kind, loose=loose) for idx, kind in derived.tangents.items()}
        expected = ((idx, self.node.expected(idx, in_parts=request.watched)) for idx in request.results)
        return {idx: tangent.converting() for idx, tangent in expected}

    def _for_any_kind(self, graph: Graph, call: BoxedCall) -> BoxedCall:
        """`call`, which computes `graph`, so that wrappers may come in the place of plain gradients."""
        if self.emitter.backend.any_tangents or not is_plain(self.joint.facts):
            return call
        places = [k for k, slot in enumerate(graph.ins) if slot.role in GRADIENT_ROLES]
        on_wrappers = functools.cache(lambda: self.emitter.reference_backward(graph).call)

        def chosen(args: list[Any]) -> Sequence[Any]:
            return (on_wrappers() if any(is_wrapper(args[k]) for k in places) else call)(args)

        return chosen

    def _compiled(self, backward: Graph) -> BoxedCall:
        graph, _ = run_passes(backward, "backward", self.emitter.settings)
        before = self.symbols.sizes().guards
        call = self.emitter.another_backward(self.joint.graphs.split, self.halves, graph).call
        added = [guard for guard in self.symbols.sizes().guards if guard not in before]
        if added:
            call = _where(added, graph, call, self.emitter.reference_backward(graph).call)
        return self._called(call, graph)

    def _called(self, call: BoxedCall, graph: Graph) -> BoxedCall:
        return self.guarded(pointing_at_the_forward(self._for_any_kind(graph, call), graph), graph)


def _takes(made: Compiled | DoubleBackward, arrived: Arrived) -> bool:
    """Whether gradients, of the same results, are of the kinds that a backward was made for."""
    return all(tangent.takes(arrived[idx]) for idx, tangent in made.tangents.items())


def _where(guards: Sequence[Expression], graph: Graph, call: BoxedCall, otherwise: BoxedCall) -> BoxedCall:
    """`call` for sizes that pass guards which nothing has tested, `otherwise` for all others."""
    places = {slot.path: k for k, slot in enumerate(graph.ins) if slot.role == "size"}

    def chosen(args: list[Any]) -> Sequence[Any]:
        symbols = {name: args[place] for name, place in places.items() if name.isidentifier()}
        return (call if all(evaluate(guard, symbols) for guard in guards) else otherwise)(args)

    return chosen


def pointing_at_the_forward(call: BoxedCall, backward: Graph) -> BoxedCall:
    """`call`, or in anomaly mode `backward` under observation."""

    def run(args: list[Any]) -> Sequence[Any]:
        if not torch.is_anomaly_enabled():
            return call(args)
        graph = with_reshapes(backward) if takes_any_strides(backward) else backward
        observed = _Observed(graph.gm)
        observed.extra_traceback = False  # the error says it better
        return observed.boxed_run(args)

    return run


class _Observed(Interpreter):
    """Runs a graph, and stops at the first node whose result goes wrong."""

    def run_node(self, n: Node) -> Any:
        try:
            value = super().run_node(n)
        except Exception as error:
            error.add_note(f"in the backward ({_name(n)}) of {_line(n)}")
            raise
        if torch.is_anomaly_check_nan_enabled() and _leaves_its_node(n) and _has_nan(value):
            raise RuntimeError(f"Function '{_name(n)}' returned nan values.\n  at {_line(n)}")
        return value


def _name(node: Node) -> str:
    return str(node.meta.get("function") or node.target)


def _line(node: Node) -> str:
    return str(node.meta.get("source") or "an unknown line")


def _leaves_its_node(node: Node) -> bool:
    """Whether a value passes from one autograd node to another, or out of the graph."""
    if node.op != "call_function" or node.meta.get("phase") != "backward":
        return False
    own = node.meta.get("seq_nr")
    return any(user.op == "output" or user.meta.get("seq_nr") != own for user in node.users)


def _has_nan(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    return bool(value.isnan().any())
