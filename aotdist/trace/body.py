"""Functions that the program passes to a higher-order operator: traced, and cut into graphs of their own.

A body is traced as any program, inside of the trace of the enclosing program, whose tensors are to it what
real tensors are to a program. What it closes over becomes an argument.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from aotdist.facts import Fresh
from aotdist.program import Graph, NodeOutIdx, PrimalIdx, Program, Row, Slot
from aotdist.subclasses.protocol import Plain
from aotdist.torch_seam.checks import intercept_checks
from aotdist.torch_seam.functional import FunctionalTensor, functional_storage_id, is_functional_base
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.proxies import graph_module
from aotdist.torch_seam.tensors import storage_id
from aotdist.torch_seam.trees import TreeSpec, pytree
from aotdist.trace.context import TraceContext, TraceOptions
from aotdist.trace.failures import refusal
from aotdist.trace.recorder import Recorder

if TYPE_CHECKING:
    from aotdist.trace.trace import Traced

_COLLECTIVES = "_c10d_functional"


Operand: TypeAlias = tuple[str, torch.Tensor]
"""A tensor that bodies take: its name, for messages, and what it is in the enclosing program."""

CutArgument: TypeAlias = tuple[torch.Tensor, Node | None]
"""An argument of a cut graph: a fake of it, and the node of the whole graph that it replaces, if needed."""


@dataclass(frozen=True, slots=True)
class Body:
    """One traced body.

    Args:
        traced: its trace; the inputs are tensors of the enclosing program.
        spec: structure of what the function returns.
        tensors: which leaves of that are tensors.
        constants: the leaves that are none; None for those that are.
    """

    traced: Traced
    spec: TreeSpec
    tensors: tuple[bool, ...]
    constants: tuple[Any, ...]

    @property
    def joint(self) -> Graph:
        """Its graph."""
        return self.traced.graph

    def differentiable(self) -> tuple[bool, ...]:
        """Which of the tensors that it returns have a gradient."""
        return tuple(out.differentiable for out in self.traced.facts.node_outs)

    def operands(self) -> list[Operand]:
        """What it takes: its arguments, then what it closes over."""
        program = self.traced.program
        pairs = zip(program.ins, program.examples, strict=True)
        return [(slot.path, example) for slot, example in pairs]

    def arguments(self) -> dict[int, Node]:
        """The graph's argument for each tensor that it takes, by the tensor's id."""
        named, program = self.joint.named_placeholders(), self.traced.program
        return {id(ex): named[slot] for slot, ex in zip(program.ins, program.examples, strict=True)}

    def tangent(self, out: int) -> Node | None:
        """The graph's argument for the gradient of one result; None if it has no gradient."""
        path = self.traced.facts.node_outs[NodeOutIdx(out)].slot.path
        return self.joint.named_placeholders().get(Slot("tangent", path))

    def gradients(self) -> dict[int, Node]:
        """The gradients, by the id of the tensor that each is of."""
        named, program = self.joint.named_results(), self.traced.program
        found = {
            id(ex): named.get(Slot("grad", slot.path))
            for slot, ex in zip(program.ins, program.examples, strict=True)
        }
        return {key: node for key, node in found.items() if node is not None}

    def results(self) -> list[Node]:
        """The nodes of what it returns."""
        named = self.joint.named_results().items()
        return [node for slot, node in named if slot.role == "output" and node is not None]


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

    def run(*tensors: torch.Tensor) -> list[Any]:
        nonlocal flat, spec
        with intercept_checks(_handles_no_check):
            flat, spec = pytree.tree_flatten(fn(*tensors))
        taken = set(map(_memory, tensors))
        outs = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        return [_of_its_own(out, recorder, taken) for out in outs]

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
    with no_modes():
        traced = trace(
            program,
            recorder,
            TraceOptions(training=torch.is_grad_enabled()),
            name_closed_over=name_closed_over,
            outer=stand_in_around,
        )
    assert spec is not None, "the trace has run the function"
    tensors = tuple(isinstance(leaf, torch.Tensor) for leaf in flat)
    constants = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in flat)
    body = Body(traced, spec, tensors, constants)
    _refuse(name, body)
    return body


def _handles_no_check(*check: Any) -> bool:
    """Leave checks of data to PyTorch: a body may not run, so its checks are not the program's."""
    return False


def _memory(plain: torch.Tensor) -> int:
    return functional_storage_id(plain) if isinstance(plain, FunctionalTensor) else 0


def _of_its_own(out: torch.Tensor, recorder: Recorder, taken: set[int]) -> torch.Tensor:
    """`out` in memory of its own: which results alias must not depend on which body runs."""
    is_own = not recorder.is_foreign(out) and isinstance(out, FunctionalTensor) and is_functional_base(out)
    result = out if is_own and _memory(out) not in taken else out.clone()
    taken.add(_memory(result))
    return result


def _refuse(name: str, body: Body) -> None:
    facts, program = body.traced.facts, body.traced.program
    grads = (grad for grad in facts.backward.grads if grad is not None)
    kinds = (*facts.recipes, *(out.recipe for out in facts.node_outs), *grads)
    if not all(isinstance(kind, Plain) for kind in kinds):
        raise refusal(
            f"`{name}` works on wrappers (a DTensor), or gives sparse gradients",
            "let it work on the plain tensors inside (`x.to_local()`)",
        )
    for idx in facts.written():
        raise refusal(f"`{name}` writes `{program.ins[idx]}`", "return the new value, and write it outside")
    if facts.metadata_writes() or facts.switched_on:
        raise refusal(f"`{name}` writes the metadata of a tensor that it is given", "return a view instead")
    assert all(isinstance(fact, Fresh) for fact in facts.outputs), "results are cloned where they alias"
    for node in body.joint.gm.graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == _COLLECTIVES:
            raise refusal(
                f"`{name}` communicates (`{node.target}`), and whether it runs depends on data",
                "communicate outside of it, where every rank does",
            )


def cut(
    whole: Graph,
    arguments: Sequence[CutArgument],
    results: Sequence[Node | torch.Tensor],
    *,
    by_rows: Collection[int] = (),
) -> GraphModule:
    """The part of a graph that leads from `arguments` to `results`, each in memory of its own.

    Args:
        whole: the graph.
        arguments: what the part takes.
        results: what it returns: nodes, or zeros like a fake.
        by_rows: positions of results that are to be contiguous.
    """
    graph = torch.fx.Graph()
    env: dict[Node, Node] = {}
    taken: set[int] = set()
    for position, (like, stands_for) in enumerate(arguments):
        new = graph.placeholder(f"arg{position}")
        new.meta["val"] = like
        taken.add(storage_id(like))
        if stands_for is not None:
            env[stands_for] = new
    taken |= {storage_id(node.meta["val"]) for node in env}
    wanted = whole.ancestors([r for r in results if isinstance(r, Node)], stop=env)
    for node in whole.gm.graph.nodes:
        if node in wanted and node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    outs: list[Node] = []
    for position, result in enumerate(results):
        out = env[result] if isinstance(result, Node) else _zeros(graph, result)
        if position in by_rows or storage_id(out.meta["val"]) in taken:
            out = _copied(graph, out, by_rows=position in by_rows)
        taken.add(storage_id(out.meta["val"]))
        outs.append(out)
    graph.output(tuple(outs))
    return graph_module(whole.gm, graph)


def _zeros(graph: torch.fx.Graph, like: torch.Tensor) -> Node:
    options: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    node = graph.call_function(torch.ops.aten.full.default, (list(like.size()), 0), options)
    node.meta["val"] = _new(like, by_rows=True)
    return node


def _copied(graph: torch.fx.Graph, source: Node, *, by_rows: bool) -> Node:
    options: dict[str, Any] = {"memory_format": torch.contiguous_format if by_rows else torch.preserve_format}
    node = graph.call_function(torch.ops.aten.clone.default, (source,), options)
    node.meta.update(source.meta, val=_new(source.meta["val"], by_rows=by_rows))
    return node


def _new(like: Any, *, by_rows: bool) -> torch.Tensor:
    """A fake as `clone` makes it."""
    with no_modes(), like.fake_mode:
        return torch.clone(like, memory_format=torch.contiguous_format if by_rows else torch.preserve_format)
