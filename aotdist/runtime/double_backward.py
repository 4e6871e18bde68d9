"""A backward with `create_graph`: it is compiled as a program with a backward of its own.

Its inputs are the node's inputs that get gradients, the tangents, and the saved values; its graph comes from
`aotdist.runtime.derive`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from aotdist.aliasing.memory import restrided
from aotdist.codegen.contract import Strides
from aotdist.codegen.emit import with_strides
from aotdist.convention.subclass import shell_of
from aotdist.errors import UnsupportedProgram
from aotdist.facts import Untouched
from aotdist.program import GRADIENT_ROLES, Call, Graph, NodeOutIdx, PrimalIdx, Program, Row, Slot, uncalled
from aotdist.runtime.held import Arguments, check_kept_inputs
from aotdist.runtime.plan import NodePlan
from aotdist.runtime.tangent import Tangent, tangent_like
from aotdist.sizes import Expression, evaluate
from aotdist.subclasses.protocol import Constant, recipe_of
from aotdist.torch_seam.autograd import failing_in_backward
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.trace.later_backwards import TracedDoubleBackward
from aotdist.trace.numbers.symbols import Symbols
from aotdist.trace.trace import Traced

Nodes = Callable[[Mapping[str, int]], Call]
"""From the sizes of a call to a function that runs the autograd node of a program."""


@dataclass(frozen=True, slots=True)
class DoubleBackward:
    """A compiled backward whose gradients have a history.

    Args:
        tangents: how each tangent is converted.
        failure: why its gradients have no history although eager's do, if so; else empty.
        node: from inputs, tangents and values to gradients; None if these have no history, as eager's do not,
            and then all that follows is empty.
        primals: the node's inputs that it takes.
        values: the other values that it takes.
        needed: the names of the values whose data it reads.
        returned: for each input, or piece, which result is its gradient, or None.
        kept: the results that user code in the backward keeps.
        guards: the guards on sizes that it was compiled under.
    """

    tangents: Mapping[NodeOutIdx, Tangent]
    failure: str
    node: Nodes | None = None
    primals: tuple[PrimalIdx, ...] = ()
    values: Arguments = Arguments((), frozenset())
    needed: frozenset[Slot] = frozenset()
    returned: tuple[NodeOutIdx | None, ...] = ()
    kept: tuple[NodeOutIdx, ...] = ()
    guards: tuple[Expression, ...] = ()

    def run(
        self, ctx: Any, plan: NodePlan, saved: Sequence[torch.Tensor], tangents: Iterable[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """The gradients, with a history, and what user code keeps.

        Args:
            ctx: the context of the node.
            plan: the plan of the node.
            saved: the saved values.
            tangents: the tangents, laid out as the graph takes them.

        Raises:
            UnsupportedProgram: an input that it needs was written since, or it is for other sizes.
        """
        symbols = getattr(ctx, "symbols", {})
        for guard in self.guards:
            if not evaluate(guard, symbols):
                raise UnsupportedProgram(
                    f"gradients of gradients were compiled for sizes where `{guard}`, which does not hold",
                    stage="runtime",
                    fix="compile with `Settings(dynamic=False)`",
                )
        assert self.node is not None, "the gradients have a history"
        check_kept_inputs(ctx, plan, self.needed)
        inputs = dict(zip(plan.kept_inputs.primals, ctx.kept_primals, strict=True))
        for idx in self.primals:
            _check_history(inputs[idx], *ctx.next_functions[idx])
        values = self.values.read(ctx, plan, saved, ())
        results = self.node(symbols)([*(inputs[idx] for idx in self.primals), *tangents, *values])
        returned = [None if at is None else results[at] for at in self.returned]
        return returned, [results[at] for at in self.kept]


def _check_history(tensor: torch.Tensor, node: Any, number: int) -> None:
    """Check that an input still has the history that it had in the forward."""
    if tensor.grad_fn is None or (tensor.grad_fn is node and tensor.output_nr == number):
        return
    raise UnsupportedProgram(
        f"an input of the program (of sizes {list(tensor.shape)}) was written after it was read, and "
        "its old history is needed: gradients are differentiated in turn (`create_graph=True`)",
        stage="runtime",
        fix="write a clone of it",
    )


def double_backward(
    traced: TracedDoubleBackward,
    plan: NodePlan,
    saved_strides: Mapping[Slot, Strides],
    symbols: Symbols,
    fake_mode: FakeTensorMode,
    compiled: Callable[[Traced], Nodes],
) -> DoubleBackward:
    """Compile what `derive_double` returned.

    Args:
        traced: the backward as a program.
        plan: how tensors pass through the node.
        saved_strides: strides of saved values, where the forward's compiler chose them.
        symbols: the symbolic sizes.
        fake_mode: the mode of the graph's `val`s.
        compiled: compiles a traced program.
    """
    before = symbols.sizes().guards
    tangents = {idx: tangent_like(*named, loose=False) for idx, named in traced.tangents.items()}
    if not traced.has_history:
        return DoubleBackward(tangents, traced.failure)
    graph = with_strides(traced.graph, saved_strides, fake_mode)
    rest = graph.ins[len(traced.plain_ins()) :]
    values = [slot for slot in rest if slot.role not in ("size", *GRADIENT_ROLES)]
    node = compiled(_as_program(traced, graph, values, symbols, fake_mode))
    return DoubleBackward(
        tangents,
        "",
        node=node,
        primals=traced.primals,
        values=Arguments.of(plan, values, ()),
        needed=frozenset(slot for slot, each in graph.named_placeholders().items() if each.users),
        returned=traced.returned,
        kept=traced.kept,
        guards=tuple(guard for guard in symbols.sizes().guards if guard not in before),
    )


def _as_program(
    traced: TracedDoubleBackward,
    graph: Graph,
    values: Sequence[Slot],
    symbols: Symbols,
    fake_mode: FakeTensorMode,
) -> Traced:
    """The backward as a program that takes `values` as further inputs, without gradients."""
    named = graph.named_placeholders()
    new_slots = [Slot("primal", f"saved {slot}") for slot in values]
    renamed = dict(zip(values, new_slots, strict=True))
    graph = Graph(graph.gm, tuple(renamed.get(slot, slot) for slot in graph.ins), graph.outs)
    facts, kinds = traced.facts, [recipe_of(named[slot].meta["val"]) for slot in values]
    facts = replace(
        facts,
        inputs=Row([*facts.inputs, *(Untouched() for _ in values)]),
        recipes=Row([*facts.recipes, *kinds]),
        backward=replace(facts.backward, grads=Row([*facts.backward.grads, *(None for _ in values)])),
        related=True,
    )
    ins = Row[PrimalIdx, Slot]([*traced.ins, *new_slots])
    program = Program(uncalled, ins, facts.recipes.map(shell_of))
    return Traced(program, graph, facts, fake_mode, symbols, traced.later)


def failing_later(grad: torch.Tensor | None, failure: str) -> torch.Tensor | None:
    """`grad`, whose own backward raises an error with this reason, if there is one."""
    if grad is None or not failure:
        return grad
    return failing_in_backward(grad, f"the backward of a compiled program has no gradient ({failure})")


def laid_out_with_history(tangent: Tangent, grad: torch.Tensor) -> torch.Tensor:
    """`grad` as a backward with a history takes it."""
    converted, recipe = tangent.converted(grad), tangent.recipe
    if isinstance(recipe, Constant) or converted.stride() == recipe.stride:
        return converted
    return restrided(converted, recipe.stride)
