"""From a trace to the exported graph: inputs first, then operations, then what is asked of the results."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, assert_never

import torch
from torch.fx import GraphModule, Node

from aotdist.errors import UnsupportedProgram
from aotdist.export.call import Input
from aotdist.export.refusals import view_made_by
from aotdist.export.trace import ExportTrace
from aotdist.facts import (
    DataWritten,
    Fresh,
    FunctionView,
    IsInput,
    MetadataWrite,
    NotATensor,
    Place,
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
    """Puts the exported graph together out of a trace.

    Args:
        traced: the trace.
        prefix: how the inputs are called.
        loss: the result that gets a gradient of one. Without, each result that requires grad gets a tangent.
    """

    def __init__(self, traced: ExportTrace, *, prefix: str, loss: int | None = None) -> None:
        self._traced = traced
        self._facts = traced.trace.facts
        self._results = traced.trace.graph.named_results()
        self._arguments = traced.trace.graph.named_placeholders()
        self._builder = GraphBuilder(traced.trace.graph.gm)
        self._add_inputs(prefix)
        self._symbols = self._add_symbols()
        if loss is None:
            self._add_tangents()
        for node in traced.trace.graph.gm.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if loss is not None and self._is_due(node):
                self._add_seed(loss)
            self._builder.copy_as_theirs(node)
        if loss is not None and not self._has_tangents():
            self._add_seed(loss)

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
            raise UnsupportedProgram(
                f"`{path}`, which is no buffer, is assigned a tensor",
                stage="export",
                fix="register it as a buffer, or return the tensor",
            )
        return self._distinct(found)

    def gradients(self) -> dict[Input, Node]:
        """The gradient of each input that has one."""
        slots = self._traced.trace.program.ins
        nodes = ((leaf, self._results.get(Slot("grad", slots[i].path))) for i, leaf in self._traced.primals())
        return self._distinct({leaf: self._builder.env[node] for leaf, node in nodes if node is not None})

    def module(self, results: Sequence[Any]) -> GraphModule:
        """The graph with these results, and nothing that they do not need."""
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
        """Read sizes off the inputs, and let what the graph takes as numbers be computed of them."""
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
        """An argument of a view, with nodes in the place of symbolic numbers."""
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

    def _add_tangents(self) -> None:
        for number, old in enumerate(self._tangents(), start=1):
            self._builder.placeholder(old, f"tangents_{number}")

    def _has_tangents(self) -> bool:
        return all(tangent in self._builder.env for tangent in self._tangents())

    def _is_due(self, node: Node) -> bool:
        """Whether `node` reads a tangent that is not there yet."""
        missing = [tangent for tangent in self._tangents() if tangent not in self._builder.env]
        return any(tangent in node.all_input_nodes for tangent in missing)

    def _add_seed(self, loss: int) -> None:
        value = self._value(OutIdx(loss))
        ones_like = torch.ops.aten.ones_like.default
        seed = self._builder.call(ones_like, (value,), like=value, name="ones_like", phase="backward")
        seed.kwargs = {"pin_memory": False, "memory_format": torch.preserve_format}
        for tangent in self._tangents():
            self._builder.env[tangent] = seed

    def _value(self, position: OutIdx, before: int | None = None) -> Any:
        """The new node of a result, or the constant that it is.

        Args:
            position: which result.
            before: an action of the program's order, before which it is looked at; after all, if None.
        """
        made = self._facts.order.index(position)
        match self._facts.outputs[position]:
            case NotATensor(value=value):
                return self._number(value)
            case Fresh(value=value):
                node = self._node_out(value, cloned=position in self._traced.cloned)
            case IsInput(input=idx):
                return self._current(idx)
            case ViewOfInput(base=idx, steps=steps):
                node = self._replayed(self._current(idx), steps)
            case ViewOfIntermediate(base=base, steps=steps):
                whole = self._reshaped(self._node_out(base), Fresh(base), slice(made))
                node = self._replayed(whole, steps)
            case ViewOfOutput(base=base, steps=()):
                return self._value(base, before)
            case ViewOfOutput(base=base, steps=steps):
                node = self._replayed(self._value(base, made), steps)
            case _ as unknown:
                assert_never(unknown)
        return self._reshaped(node, ViewOfOutput(position, ()), slice(made, before))

    def _reshaped(self, node: Node, place: Place, when: slice) -> Node:
        """`node`, whose sizes and strides the program has written `when`."""
        for action in self._facts.order[when]:
            if isinstance(action, MetadataWrite) and action.target == place:
                view = view_made_by(action)
                node = node if view is None else self._view(node, view, action.args, action.kwargs)
        return node

    def _node_out(self, idx: NodeOutIdx, *, cloned: bool = False) -> Node:
        node = self._results[self._facts.node_outs[idx].slot]
        assert node is not None, "only a gradient may be absent"
        if cloned and node.target is torch.ops.aten.clone.default:
            (node,) = node.all_input_nodes
        return self._builder.env[node]

    def _current(self, idx: PrimalIdx) -> Node:
        """The value of an input once the program is over."""
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
        """The view of `base` that an operator makes, or several in a row."""
        with no_modes(), self._traced.trace.fake_mode:
            val = op(base.meta["val"], *args, **dict(kwargs))
        given = map(self._number, args) if is_symbolic(args) else args
        name = operator_name(op) or "view"
        made = self._builder.call(op, (base, *given), like=base, name=name, val=val)
        made.kwargs = dict(kwargs)
        return made

    def _assigned(self) -> dict[str, OutIdx]:
        """Places that the program assigns a tensor to, and the result that has it."""
        returned = self._traced.returned()
        found: dict[str, OutIdx] = {}
        position = returned.spec.num_leaves
        for source, spec in returned.assigned():
            if not spec.is_leaf():
                raise UnsupportedProgram(
                    f"`{source.path}` is assigned a container of tensors",
                    stage="export",
                    fix="return the tensors",
                )
            found[source.path] = OutIdx(position)
            position += 1
        for _, path in returned.replaced:
            raise UnsupportedProgram(
                f"the attribute `{path[1:]}` of a wrapper is replaced",
                stage="export",
                fix="return the tensor",
            )
        return found

    def _distinct(self, nodes: dict[Input, Node]) -> dict[Input, Node]:
        """The same with a copy of each node that is there twice: signatures go by names."""
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
