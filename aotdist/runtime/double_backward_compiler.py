"""Compiles the backward of a program as a program with a backward of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from aotdist.capture.alone import alone
from aotdist.codegen.contract import Strides
from aotdist.codegen.emit import with_strides
from aotdist.errors import InternalError
from aotdist.facts import Untouched
from aotdist.joint.later_backwards import LaterBackwards, TracedDoubleBackward
from aotdist.joint.symbols import Symbols
from aotdist.joint.trace import Traced
from aotdist.partition.double_backward import no_double_backward
from aotdist.partition.from_saved import from_saved
from aotdist.program import GRADIENT_ROLES, Graph, PrimalIdx, Program, Row, Slot, Split
from aotdist.runtime.artifact import backward_of
from aotdist.runtime.compilation import Training, shell_of
from aotdist.runtime.double_backward import CompiledDoubleBackward
from aotdist.runtime.node import make_node, without_autocast
from aotdist.runtime.other_kinds import Arrived
from aotdist.runtime.plan import NodePlan
from aotdist.runtime.tangent import tangent_like
from aotdist.subclasses.protocol import recipe_of
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.modes import users_modes_off
from aotdist.torch_seam.symbols import symbols_in


@dataclass
class DoubleBackwardCompiler:
    """Compiles differentiable backwards of one program; each once.

    Args:
        later: traces the backwards that are to be compiled; None once it was let go.
        joint: the program, as it was cut.
        split: the two halves of it.
        saved_strides: those of saved values, where the forward's compiler chose them.
        node: how tensors pass through its node.
        symbols: its symbolic sizes.
        fake_mode: the mode of its graphs' `val`s.
        compiled: compiles a program that was traced.
        is_exact: see `DoubleBackwardPlan`.
        failure: likewise.
    """

    later: LaterBackwards | None
    joint: Graph
    split: Split
    saved_strides: Mapping[Slot, Strides]
    node: NodePlan
    symbols: Symbols
    fake_mode: FakeTensorMode
    compiled: Callable[[Traced], Training]
    is_exact: bool
    failure: str
    _made: list[CompiledDoubleBackward] = field(default_factory=list)

    def forget_trace(self) -> None:
        """Let go of what traces backwards, unless it was used, or nothing else could stand in for it."""
        if (self.is_exact or self.failure) and not self._made:
            self.later = None

    def has_trace(self) -> bool:
        """Whether backwards can be traced."""
        return self.later is not None

    def is_there(self) -> bool:
        """Whether there is one, or a reason why there is none."""
        return self.later is not None or not self.is_exact

    def __call__(self, arrived: Arrived) -> CompiledDoubleBackward:
        """The one for such gradients.

        Raises:
            UnsupportedProgram: there is none.
        """
        found = next((made for made in self._made if made.takes(arrived)), None)
        if found is None:
            if any(map(symbols_in, self.symbols)):  # others are numbers by now
                obstacle = self.node.obstacle or "gradients are of other kinds than the results"
                raise no_double_backward(f"{obstacle}, and sizes are symbolic")
            if self.later is None and self.is_exact:
                raise no_double_backward("gradients are of other kinds than the results")
            if self.later is None:
                return CompiledDoubleBackward({}, failure=self.failure)
            found = self._make(self.later, arrived)
            self._made.append(found)
        return found

    @alone
    def _make(self, later: LaterBackwards, arrived: Arrived) -> CompiledDoubleBackward:
        with users_modes_off():
            return self._compile(later.differentiable(arrived), arrived)

    def _compile(self, traced: TracedDoubleBackward, arrived: Arrived) -> CompiledDoubleBackward:
        tangents = {
            idx: (tangent_like(*named, loose=False), arrived[idx].requires_grad)
            for idx, named in traced.tangents.items()
        }
        if not traced.grads:
            return CompiledDoubleBackward(tangents, failure=traced.failure)
        kept, first = self.node.kept.slots, traced.plain_ins()
        outs = {out.slot.path for out in traced.facts.node_outs}
        gradients = [slot for slot in traced.graph.ins if slot.role == "tangent" and slot.path in outs]
        graph = from_saved(traced.graph, self.joint, self.split, kept, first, gradients)
        graph = with_strides(graph, self.saved_strides, self.fake_mode)
        rest = graph.ins[len(first) :]
        values = tuple(slot for slot in rest if slot.role not in GRADIENT_ROLES)
        region = self.compiled(self._as_program(traced, graph, values))
        forward = without_autocast(region.halves.forward.call)
        backward = backward_of(region, lambda call, _: without_autocast(call), lambda: None)
        return CompiledDoubleBackward(
            tangents,
            primals=traced.primals,
            values=values,
            needed=frozenset(slot for slot, node in graph.named_placeholders().items() if node.users),
            call=make_node(region.node, forward, backward, {}, {}),
            grads=traced.grads,
            kept=traced.kept,
        )

    def _as_program(self, traced: TracedDoubleBackward, graph: Graph, values: Sequence[Slot]) -> Traced:
        """The backward as a program that takes `values`, too."""
        named = graph.named_placeholders()
        more = [Slot("primal", f"saved {slot}") for slot in values]
        renamed = dict(zip(values, more, strict=True))
        graph = Graph(graph.gm, tuple(renamed.get(slot, slot) for slot in graph.ins), graph.outs)
        facts, kinds = traced.facts, [recipe_of(named[slot].meta["val"]) for slot in values]
        facts = replace(
            facts,
            inputs=Row([*facts.inputs, *(Untouched() for _ in values)]),
            recipes=Row([*facts.recipes, *kinds]),
            backward=replace(facts.backward, grads=Row([*facts.backward.grads, *(None for _ in values)])),
            related=True,
        )
        ins = Row[PrimalIdx, Slot]([*traced.ins, *more])
        program = Program(_never, ins, facts.recipes.map(shell_of))
        return Traced(program, graph, facts, self.fake_mode, self.symbols, traced.later)


def _never(*args: Any) -> NoReturn:
    raise InternalError("the program of a backward was called; only its graph is to run", stage="runtime")
