"""From a trace to the exported graph: inputs, then operations, then views and gradients as results."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, assert_never

import torch
from torch.fx import GraphModule, Node

from aotdist.export.refusals import unsupported
from aotdist.export.trace import ExportTrace, Input
from aotdist.facts import (
    DataWritten,
    Fresh,
    FunctionView,
    IsInput,
    NotATensor,
    Step,
    Untouched,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
    data_of,
)
from aotdist.partition.builder import GraphBuilder
from aotdist.program import NodeOutIdx, OutIdx, PrimalIdx, Slot
from aotdist.sizes import is_symbolic
from aotdist.torch_seam.modes import no_modes
from aotdist.torch_seam.nodes import spell_number
from aotdist.torch_seam.operators import operator_name
from aotdist.torch_seam.symbols import SYMBOLIC
from aotdist.trace.numbers.unbacked import MEASURES


class Assembly:
    """Builds the exported graph of a trace.

    Args:
        prefix: name of the inputs, with a place for their number.
        loss: the result whose gradient is one. Without, each result that requires grad has a tangent.
    """

    def __init__(self, traced: ExportTrace, *, prefix: str, loss: int | None = None) -> None:
        self._traced = traced
        self._facts = traced.trace.facts
        self._results = traced.trace.graph.named_results()
        self._arguments = traced.trace.graph.named_placeholders()
        self._builder = GraphBuilder(traced.trace.graph.gm)
        self._add_inputs(prefix)
        self._symbols = self._add_symbols()
        tangents = self._tangents()
        if loss is None:
            for number, tangent in enumerate(tangents, start=1):
                self._builder.placeholder(tangent, f"tangents_{number}")
        unseeded = loss
        for node in traced.trace.graph.gm.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if unseeded is not None and not set(tangents).isdisjoint(node.all_input_nodes):
                self._add_seed(unseeded, tangents)
                unseeded = None
            self._builder.copy_as_theirs(node)
        if unseeded is not None:
            self._add_seed(unseeded, tangents)

    def values(self) -> list[Any]:
        """The program's results: nodes, and constants."""
        return [self._value(OutIdx(position)) for position in range(self._traced.returned().spec.num_leaves)]

    def new_values(self) -> dict[Input, Node]:
        """The new value of each input that is written or assigned."""
        assigned = self._assigned()
        found: dict[Input, Node] = {}
        for idx, leaf in self._traced.primals():
            if leaf.path in assigned and leaf.kind == "buffer":
                found[leaf] = self._value(assigned.pop(leaf.path))
            elif isinstance(self._facts.inputs[idx], DataWritten):
                found[leaf] = self._current(idx)
        for path in assigned:
            what = f"`{path}`, which is no buffer, is assigned a tensor"
            raise unsupported(what, "register it as a buffer, or return the tensor")
        return self._distinct(found)

    def gradients(self) -> dict[Input, Node]:
        """The gradient of each input that has one."""
        slots = self._traced.trace.program.ins
        nodes = ((leaf, self._results.get(Slot("grad", slots[i].path))) for i, leaf in self._traced.primals())
        return self._distinct({leaf: self._builder.env[node] for leaf, node in nodes if node is not None})

    def module(self, results: Sequence[Any]) -> GraphModule:
        """The graph with these results, without dead code."""
        gm = self._builder.finish(results, (), ()).gm
        gm.graph.eliminate_dead_code()
        return gm

    def _add_inputs(self, prefix: str) -> None:
        slots = {leaf: self._traced.trace.program.ins[idx] for idx, leaf in self._traced.primals()}
        first = 0 if prefix.startswith("arg") else 1
        for number, leaf in enumerate(self._traced.inputs, start=first):
            name = prefix.format(number)
            if leaf in slots:
                self._builder.placeholder(self._arguments[slots[leaf]], name)
            else:
                self._builder.graph.placeholder(name).meta["val"] = leaf.value

    def _add_symbols(self) -> dict[str, Node]:
        """Read the symbols off the inputs' sizes, and compute the graph's symbolic numbers from them."""
        symbols = self._traced.trace.symbols
        slots = self._traced.trace.program.ins
        found: dict[str, Node] = {}
        for value, (name, measure) in zip(symbols, symbols.sizes().symbols, strict=True):
            argument = self._builder.env[self._arguments[slots[measure.input]]]
            read = self._builder.graph.call_function(MEASURES[measure.of], (argument, measure.dim))
            read.meta["val"] = value
            found[name] = read
        for slot, node in self._arguments.items():
            if slot.role == "size":
                number = spell_number(node.meta["val"], found, self._builder.graph)
                self._builder.env[node] = number
        return found

    def _number(self, value: Any) -> Any:
        """An argument of a view, with nodes for its symbolic numbers."""
        if isinstance(value, (list, tuple)):
            return [self._number(item) for item in value]
        if not isinstance(value, SYMBOLIC):
            return value
        return spell_number(value, self._symbols, self._builder.graph)

    def _tangents(self) -> list[Node]:
        """The tangents of the trace, in the order of the results."""
        fresh = [fact.value for fact in self._traced.outputs() if isinstance(fact, Fresh)]
        outs = [self._facts.node_outs[value] for value in fresh]
        return [self._arguments[Slot("tangent", out.slot.path)] for out in outs if out.differentiable]

    def _add_seed(self, loss: int, tangents: Sequence[Node]) -> None:
        """Use a gradient of one as the loss's tangent."""
        value = self._value(OutIdx(loss))
        ones_like = torch.ops.aten.ones_like.default
        seed = self._builder.call(ones_like, (value,), like=value, name="ones_like", phase="backward")
        seed.kwargs = {"pin_memory": False, "memory_format": torch.preserve_format}
        self._builder.env |= dict.fromkeys(tangents, seed)

    def _value(self, position: OutIdx) -> Any:
        """The new node of a result, or the constant that it is."""
        match self._facts.outputs[position]:
            case NotATensor(value=value):
                return self._number(value)
            case Fresh(value=value):
                return self._node_out(value, cloned=position in self._traced.cloned)
            case IsInput(input=idx):
                return self._current(idx)
            case ViewOfInput(base=idx, steps=steps):
                return self._replayed(self._current(idx), steps)
            case ViewOfIntermediate(base=base, steps=steps):
                return self._replayed(self._node_out(base), steps)
            case ViewOfOutput(base=base, steps=steps):
                return self._replayed(self._value(base), steps)
            case _ as unknown:
                assert_never(unknown)

    def _node_out(self, idx: NodeOutIdx, *, cloned: bool = False) -> Node:
        node = self._results[self._facts.node_outs[idx].slot]
        assert node is not None, "only a gradient may be absent"
        if cloned and node.target is torch.ops.aten.clone.default:
            (node,) = node.all_input_nodes
        return self._builder.env[node]

    def _current(self, idx: PrimalIdx) -> Node:
        """The value of an input at the end of the program."""
        match self._facts.inputs[idx]:
            case DataWritten(value=value):
                return self._node_out(value)
            case Untouched():
                return self._builder.env[self._arguments[self._traced.trace.program.ins[idx]]]
            case _ as unknown:
                assert_never(unknown)

    def _replayed(self, base: Node, steps: Sequence[Step]) -> Node:
        """The view of `base` that `steps` make."""
        for step in steps:
            if isinstance(step, FunctionView):
                base = self._node_out(step.value)
                continue
            op = torch.ops.aten.detach.default if step.op is data_of else step.op
            base = self._view(base, op, step.args, step.kwargs)
            if step.pick is not None:
                picked = base.meta["val"][step.pick]
                item = operator.getitem
                base = self._builder.call(item, (base, step.pick), like=base, name="getitem", val=picked)
        return base

    def _view(
        self, base: Node, op: Callable[..., Any], args: Sequence[Any], kwargs: Iterable[tuple[str, Any]]
    ) -> Node:
        """The view of `base` that an operator makes."""
        with no_modes(), self._traced.trace.fake_mode:
            val = op(base.meta["val"], *args, **dict(kwargs))
        given = map(self._number, args) if is_symbolic(args) else args
        name = operator_name(op) or "view"
        made = self._builder.call(op, (base, *given), like=base, name=name, val=val)
        made.kwargs = dict(kwargs)
        return made

    def _assigned(self) -> dict[str, OutIdx]:
        """Paths that the program assigns a tensor to, and the output that is this tensor."""
        returned = self._traced.returned()
        found: dict[str, OutIdx] = {}
        position = returned.spec.num_leaves
        for source, spec in returned.assigned():
            if not spec.is_leaf():
                raise unsupported(f"`{source.path}` is assigned a container of tensors", "return the tensors")
            found[source.path] = OutIdx(position)
            position += 1
        return found

    def _distinct(self, nodes: dict[Input, Node]) -> dict[Input, Node]:
        """The same with a clone of each node that stands twice: signatures go by the names of nodes."""
        seen: set[Node] = set()
        found: dict[Input, Node] = {}
        for leaf, node in nodes.items():
            if node in seen:
                clone = torch.ops.aten.clone.default
                found[leaf] = self._builder.call(clone, (node,), like=node, name="clone")
            else:
                found[leaf] = node
            seen.add(found[leaf])
        return found
