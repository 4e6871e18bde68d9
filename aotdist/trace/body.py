"""Functions that the program passes to a higher-order operator: traced, and made into graphs of their own.

A body is traced as any program, inside of the trace of the enclosing program, whose tensors are to it what
real tensors are to a program. What it closes over becomes an argument.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from aotdist.facts import Fresh
from aotdist.program import Graph, PrimalIdx, Program, Row, Slot
from aotdist.subclasses.protocol import Plain, is_wrapper
from aotdist.torch_seam.checks import intercept_checks
from aotdist.torch_seam.functional import FunctionalTensor, functional_storage_id, is_functional_base
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.proxies import graph_module
from aotdist.torch_seam.trees import TreeSpec, pytree
from aotdist.trace.context import TraceContext, TraceOptions
from aotdist.trace.failures import refusal
from aotdist.trace.recorder import Recorder

if TYPE_CHECKING:
    from aotdist.trace.trace import Traced

_COLLECTIVES = "_c10d_functional"


Operand: TypeAlias = tuple[str, torch.Tensor]
"""A tensor that bodies take: its name, for messages, and what it is in the enclosing program."""


@dataclass(frozen=True, slots=True)
class Body:
    """One traced body.

    Args:
        graph: its graph, which returns the tensors among the leaves of the result.
        operands: what the graph takes: the arguments, then what the function closes over.
        spec: structure of what the function returns.
        leaves: the leaves of that: for a tensor its metadata, else the constant.
        requires_grad: for each of the tensors, whether it has a history.
    """

    graph: Graph
    operands: tuple[Operand, ...]
    spec: TreeSpec
    leaves: tuple[Any, ...]
    requires_grad: tuple[bool, ...]

    def results(self) -> list[torch.Tensor]:
        """Fakes of the tensors that it returns."""
        return [node.meta["val"] for node in self.graph.results() if node is not None]

    def reads(self) -> set[int]:
        """The identities of the operands that it computes with."""
        pairs = zip(self.operands, self.graph.placeholders(), strict=True)
        return {id(tensor) for (_, tensor), node in pairs if node.users}

    def module(self, operands: Sequence[torch.Tensor], likes: Sequence[torch.Tensor]) -> GraphModule:
        """Its graph as a module that takes these operands, in this order, whether it reads them or not.

        Args:
            operands: tensors of the enclosing program; all that it reads are among them.
            likes: a fake of each.
        """
        graph, env = torch.fx.Graph(), dict[Node, Node]()
        pairs = zip(self.operands, self.graph.placeholders(), strict=True)
        own = {id(tensor): node for (_, tensor), node in pairs}
        for position, (operand, like) in enumerate(zip(operands, likes, strict=True)):
            placeholder = graph.placeholder(f"arg{position}")
            placeholder.meta["val"] = like
            if (node := own.get(id(operand))) is not None:
                env[node] = placeholder
        for node in self.graph.gm.graph.nodes:
            if node.op not in ("placeholder", "output"):
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[node] for node in self.graph.results() if node is not None))
        return graph_module(self.graph.gm, graph)


def trace_body(
    name: str,
    fn: Callable[..., Any],
    operands: Sequence[Operand],
    around: TraceContext,
    trace: Callable[..., Traced],
) -> Body:
    """Trace `fn` on `operands`.

    Args:
        name: what it is, for messages.
        fn: takes the operands' tensors.
        operands: distinct tensors of the program around it.
        around: the trace of the program that hands over the body.
        trace: `aotdist.trace.trace.trace`, which traces bodies too.

    Raises:
        UnsupportedProgram: it writes what it is given, communicates, or works on wrappers.
    """
    recorder = around.recorder.nested()
    flat: list[Any] = []
    spec: TreeSpec | None = None
    requires_grad: list[bool] = []

    def run(*tensors: torch.Tensor) -> list[Any]:
        nonlocal flat, spec, requires_grad
        with intercept_checks(_handles_no_check):
            flat, spec = pytree.tree_flatten(fn(*tensors))
        taken = set(map(_memory, tensors))
        outs = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        requires_grad = [out.requires_grad for out in outs]
        return [_in_memory_of_its_own(out, recorder, taken) for out in outs]

    names = {path for path, _ in operands}

    def name_closed_over(tensor: torch.Tensor) -> Slot:
        stem = around.inputs.name_of(tensor) or "closed over"
        path = next(n for k in itertools.count() if (n := f"{stem}[{k}]" if k else stem) not in names)
        names.add(path)
        return Slot("primal", path)

    def stand_in_around(tensor: torch.Tensor) -> torch.Tensor:
        with around.recorder.resumed():
            return around.stand_in(tensor)

    slots = Row[PrimalIdx, Slot](Slot("primal", name) for name, _ in operands)
    program = Program(run, slots, Row([tensor for _, tensor in operands]))
    options = TraceOptions(training=False)
    with no_modes():
        traced = trace(program, recorder, options, name_closed_over=name_closed_over, outer=stand_in_around)
    assert spec is not None, "the trace has run the function"
    _refuse(name, traced)
    recipes = iter(traced.facts.node_outs)
    leaves = (next(recipes).recipe if isinstance(leaf, torch.Tensor) else leaf for leaf in flat)
    paths = [slot.path for slot in traced.program.ins]
    taken = tuple(zip(paths, traced.program.examples, strict=True))
    return Body(traced.graph, taken, spec, tuple(leaves), tuple(requires_grad))


def _handles_no_check(*check: Any) -> bool:
    """Leave checks of data to PyTorch: a body may not run, so its checks are not the program's."""
    return False


def _memory(plain: torch.Tensor) -> int:
    return functional_storage_id(plain) if isinstance(plain, FunctionalTensor) else 0


def _in_memory_of_its_own(out: torch.Tensor, recorder: Recorder, taken: set[int]) -> torch.Tensor:
    """`out`, cloned if it shares memory: which results alias must not depend on which body runs."""
    if is_wrapper(out):
        return out  # `_refuse` names it
    is_own = not recorder.is_foreign(out) and isinstance(out, FunctionalTensor) and is_functional_base(out)
    result = out if is_own and _memory(out) not in taken else out.clone()
    taken.add(_memory(result))
    return result


def _refuse(name: str, traced: Traced) -> None:
    facts, program = traced.facts, traced.program
    if not all(
        isinstance(kind, Plain) for kind in (*facts.recipes, *(out.recipe for out in facts.node_outs))
    ):
        raise refusal(
            f"`{name}` works on wrappers (a DTensor), or gives sparse gradients",
            "let it work on the plain tensors inside (`x.to_local()`)",
        )
    for idx in facts.written():
        raise refusal(f"`{name}` writes `{program.ins[idx]}`", "return the new value, and write it outside")
    if facts.metadata_writes() or facts.switched_on:
        raise refusal(f"`{name}` writes the metadata of a tensor that it is given", "return a view instead")
    assert all(isinstance(fact, Fresh) for fact in facts.outputs), "results are cloned where they alias"
    for node in traced.graph.gm.graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == _COLLECTIVES:
            raise refusal(
                f"`{name}` communicates (`{node.target}`), and whether it runs depends on data",
                "communicate outside of it, where every rank does",
            )
