"""A backward whose gradients are differentiated in turn: it is a program with a backward of its own.

Its inputs are those of the node that get gradients, the gradients that arrive, and what the node saved; its
graph is that of `aotdist.runtime.derive`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from aotdist.codegen.contract import Strides
from aotdist.codegen.emit import with_strides
from aotdist.convention.subclass import shell_of
from aotdist.errors import InternalError, UnsupportedProgram
from aotdist.facts import Untouched
from aotdist.program import GRADIENT_ROLES, Call, Graph, NodeOutIdx, PrimalIdx, Program, Row, Slot
from aotdist.runtime.held import Arguments, check_unwritten
from aotdist.runtime.plan import NodePlan
from aotdist.runtime.tangent import Tangent, restrided, tangent_like
from aotdist.sizes import Expression, evaluate
from aotdist.subclasses.protocol import Constant, recipe_of
from aotdist.torch_seam.autograd import failing_in_backward
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.trace.later_backwards import TracedDoubleBackward
from aotdist.trace.numbers.symbols import Symbols
from aotdist.trace.trace import Traced

Nodes = Callable[[Mapping[str, int]], Call]
"""The autograd node of a program as a call, for the sizes of a call."""


@dataclass(frozen=True, slots=True)
class DoubleBackward:
    """A backward for gradients that are differentiated in turn: a program of its own, compiled.

    Args:
        tangents: how each gradient that arrives is converted.
        failure: why they have no history although eager's have, if so.
        node: inputs, gradients, values -> gradients; None if these have no history, and with it all that
            follows.
        primals: the inputs of the node that it takes.
        values: the other values that it takes.
        needed: the names of all values whose data it reads.
        returned: which result is the gradient of each input, or each piece; None for none.
        kept: the results that user code in the backward keeps.
        guards: what holds of the sizes that it is for.
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
            tangents: the gradients that arrived, laid out as the graph takes them.

        Raises:
            UnsupportedProgram: it needs an input that was written since, or has another history, or it is for
                other sizes.
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
        check_unwritten(ctx, plan, self.needed)
        inputs = dict(zip(plan.kept_inputs.primals, ctx.kept_primals, strict=True))
        for idx in self.primals:
            _check_history(inputs[idx], *ctx.next_functions[idx])
        values = self.values.read(ctx, plan, saved, ())
        results = self.node(symbols)([*(inputs[idx] for idx in self.primals), *tangents, *values])
        returned = [None if at is None else results[at] for at in self.returned]
        return returned, [results[at] for at in self.kept]


def _check_history(tensor: torch.Tensor, node: Any, number: int) -> None:
    """See that the gradient of an input would go where it went when the forward ran."""
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
    """Compile what `derive_double` made of a request.

    Args:
        traced: the backward as a program.
        plan: how tensors pass through the node.
        saved_strides: those of saved values, where the forward's compiler chose them.
        symbols: the symbolic sizes.
        fake_mode: the mode of the graph's `val`s.
        compiled: compiles a program that was traced.
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
    return Traced(program, graph, facts, fake_mode, symbols, traced.later)


def _never(*args: Any) -> NoReturn:
    raise InternalError("the program of a backward was called; only its graph is to run", stage="runtime")


def failing_later(grad: torch.Tensor | None, failure: str) -> torch.Tensor | None:
    """`grad` with a history whose backward raises, and says why; as it is, if there is no failure."""
    if grad is None or not failure:
        return grad
    return failing_in_backward(grad, f"the backward of a compiled program has no gradient ({failure})")


def laid_out_with_history(tangent: Tangent, grad: torch.Tensor) -> torch.Tensor:
    """`grad` as a backward with a history takes it."""
    converted, recipe = tangent.converted(grad), tangent.recipe
    if isinstance(recipe, Constant) or converted.stride() == recipe.stride:
        return converted
    return restrided(converted, recipe.stride)
