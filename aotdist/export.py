"""One flat functional graph of a program, for whoever compiles or ships it: no runtime around it.

A graph takes parameters, buffers and the leaves of the arguments, in that order; it writes nothing. It
returns the new values of what the program writes, then its results, views and inputs among them, then
gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, assert_never, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from aotdist.api import disable
from aotdist.capture.arguments import ConstantLeaf
from aotdist.capture.capture import Captured, Returned, capture
from aotdist.capture.modules import Place, StateTensor, swapped
from aotdist.convention.memory import share_memory
from aotdist.errors import BadSettings, InternalError, UnsupportedProgram
from aotdist.facts import (
    DataWritten,
    Fresh,
    IsInput,
    NotATensor,
    OutputFact,
    Untouched,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
    ViewStep,
)
from aotdist.joint.proxies import Recorder
from aotdist.joint.trace import Traced, trace
from aotdist.partition.builder import GraphBuilder, collector_paused
from aotdist.program import NodeOutIdx, OutIdx, PrimalIdx, Program, Row, Slot
from aotdist.settings import Settings
from aotdist.subclasses.protocol import Plain, is_real, recipe_of
from aotdist.torch_seam import (
    OpOverload,
    TreeSpec,
    call_with_primals_and_tangents,
    no_modes,
    operator_name,
    pytree,
    tree_children,
)

__all__ = ["BackwardSignature", "GraphSignature", "aot_export_joint_simple", "aot_export_module"]


@dataclass(frozen=True, slots=True)
class BackwardSignature:
    """What the backward part of a joint graph computes; values of the graph go by the names of their nodes.

    Args:
        gradients_to_parameters: the parameter that each gradient is of.
        gradients_to_user_inputs: the graph input that each gradient is of.
        loss_output: the result that is differentiated.
    """

    gradients_to_parameters: dict[str, str]
    gradients_to_user_inputs: dict[str, str]
    loss_output: str


@dataclass(frozen=True, slots=True)
class GraphSignature:
    """What a graph takes and returns; values of the graph go by the names of their nodes.

    Args:
        parameters: qualified names of the parameters, in the order of the graph's inputs.
        buffers: likewise of the buffers, which come after them.
        user_inputs: the inputs after those, one for each leaf of the arguments.
        user_outputs: the program's results; None for one that is a constant.
        inputs_to_parameters: which input is which parameter.
        inputs_to_buffers: which input is which buffer.
        buffers_to_mutate: results that are new values of buffers.
        parameters_to_mutate: results that are new values of parameters.
        user_inputs_to_mutate: results that are new values of user inputs.
        in_spec: structure of `((*parameters, *buffers, *args), kwargs)`.
        out_spec: structure of what the module returns.
        backward_signature: of a joint graph.
        input_tokens: always empty: no operator with side effects is ordered by tokens.
        output_tokens: likewise.
    """

    parameters: list[str]
    buffers: list[str]
    user_inputs: list[str]
    user_outputs: list[str | None]
    inputs_to_parameters: dict[str, str]
    inputs_to_buffers: dict[str, str]
    buffers_to_mutate: dict[str, str]
    parameters_to_mutate: dict[str, str]
    user_inputs_to_mutate: dict[str, str]
    in_spec: TreeSpec
    out_spec: TreeSpec
    backward_signature: BackwardSignature | None
    input_tokens: list[str]
    output_tokens: list[str]


def aot_export_module(
    mod: nn.Module,
    args: Sequence[Any],
    *,
    decompositions: Mapping[OpOverload, Callable[..., Any]] | None = None,
    trace_joint: bool,
    output_loss_index: int | None = None,
    pre_dispatch: bool = False,
    dynamic_shapes: bool | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[GraphModule, GraphSignature]:
    """The graph of one call of a module, and what it takes and returns.

    Parameters that are tied are inputs of their own, each with its part of the gradient.

    Args:
        mod: a plain module.
        args: positional arguments of the call.
        decompositions: operators to break up.
        trace_joint: append the gradients of the loss with respect to all inputs that require grad. Without,
            the program runs under `no_grad`.
        output_loss_index: which result is the loss: one number; no other result may require grad.
        pre_dispatch: not available.
        dynamic_shapes: not available; sizes are static.
        kwargs: keyword arguments of the call.

    Raises:
        BadSettings: an option that is not available is set.
        UnsupportedProgram: the program cannot be expressed that way; the error says what is in the way.
    """
    _refuse_options(pre_dispatch=pre_dispatch, dynamic_shapes=bool(dynamic_shapes))
    if trace_joint and output_loss_index is None:
        raise BadSettings("`trace_joint` needs to know the loss", fix="set `output_loss_index`")
    loss = output_loss_index if trace_joint else None
    call = _Call(mod, tuple(args), dict(kwargs or {}), _state(mod))
    with torch.set_grad_enabled(trace_joint and torch.is_grad_enabled()):
        traced = _trace(call, decompositions or {}, loss=loss, fresh=() if loss is None else (loss,))
    _refuse_writes(traced, joint=trace_joint)
    assembly = _Assembly(traced, prefix="arg{}_1", loss=loss)
    mutated = assembly.new_values()
    values = assembly.values()
    grads = assembly.gradients() if trace_joint else {}
    for leaf in traced.inputs if trace_joint else ():
        if leaf.requires_grad() and leaf not in grads:
            raise _without_gradient(leaf)
    gm = assembly.module([*mutated.values(), *values, *grads.values()])
    state = (leaf.value for leaf, _ in call.state)
    in_spec = pytree.tree_structure(((*state, *call.args), dict(call.kwargs)))
    return gm, _signature(gm, traced, in_spec, list(mutated), list(grads), loss)


def aot_export_joint_simple(
    func: Callable[..., Any],
    args: Sequence[Any],
    *,
    trace_joint: bool,
    num_params_buffers: int = 0,
    decompositions: Mapping[OpOverload, Callable[..., Any]] | None = None,
) -> GraphModule:
    """The graph of a function that takes and returns flat tuples, called just like the function.

    With `trace_joint`, if a result requires grad, it is a joint graph: `(primals, tangents)` to
    `(results, gradients)`, with one tangent for each result that requires grad, and one gradient, or None,
    for each primal.

    Args:
        func: writes no input; no result is an input or a view of one.
        args: tensors and constants.
        trace_joint: trace the backward too. Without, the function runs under `no_grad`.
        num_params_buffers: how many of the first arguments are parameters and buffers; makes no difference.
        decompositions: operators to break up.

    Raises:
        UnsupportedProgram: the function breaks one of these rules.
    """
    if not _is_flat(pytree.tree_structure(args)):
        raise _not_simple("the arguments are not one flat tuple of tensors and constants")
    call, table = _Call(func, tuple(args), {}, ()), decompositions or {}
    with torch.set_grad_enabled(trace_joint and torch.is_grad_enabled()):
        traced = _trace(call, table)
        _refuse_what_is_not_simple(traced)
        repeated = [k for k, fact in enumerate(traced.outputs()) if isinstance(fact, ViewOfOutput)]
        if traced.trace.has_backward() and repeated:
            # A tensor that is returned twice gets two tangents.
            traced = _trace(call, table, fresh=repeated)
    joint = traced.trace.has_backward()
    assembly = _Assembly(traced, prefix="primals_{}" if joint else "arg{}_1")
    values = assembly.values()
    if not joint:
        return assembly.module(values)
    grads = assembly.gradients()
    gm = assembly.module([*values, *(grads.get(leaf) for leaf in traced.inputs)])
    call_with_primals_and_tangents(gm, len(traced.inputs), len(values))
    return gm


# --- the trace ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Input:
    """One input of the graph.

    Args:
        path: its name in messages; that of a parameter or a buffer is its qualified name.
        value: a tensor, or a constant.
        kind: where it comes from.
    """

    path: str
    value: Any
    kind: Literal["parameter", "buffer", "argument"]

    def requires_grad(self) -> bool:
        """Whether the loss is differentiated for it."""
        return isinstance(self.value, torch.Tensor) and self.value.requires_grad


@dataclass(frozen=True, slots=True)
class _Call:
    """What is exported.

    Args:
        target: the module or function.
        args: positional arguments.
        kwargs: keyword arguments.
        state: parameters and buffers under each of their names, and where each hangs.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: tuple[tuple[_Input, Place], ...]

    def tied(self) -> list[tuple[int, StateTensor]]:
        """State that hangs in a second place: its position, and that place."""
        first: dict[int, Place] = {}
        return [
            (position, StateTensor(leaf.path, leaf.value, (place,)))
            for position, (leaf, place) in enumerate(self.state)
            if not _same_place(first.setdefault(id(leaf.value), place), place)
        ]


def _same_place(a: Place, b: Place) -> bool:
    return a.owner is b.owner and a.key == b.key


def _state(mod: nn.Module) -> tuple[tuple[_Input, Place], ...]:
    """Parameters, then buffers, of a module and all below it, under each of their names."""
    found: list[tuple[_Input, Place]] = []

    def add(kind: Literal["parameter", "buffer"], path: str, value: torch.Tensor) -> None:
        prefix, _, name = path.rpartition(".")
        place = Place(vars(mod.get_submodule(prefix))[f"_{kind}s"], name)
        found.append((_Input(path, value, kind), place))

    for path, value in mod.named_parameters(remove_duplicate=False):
        add("parameter", path, value)
    for path, value in mod.named_buffers(remove_duplicate=False):
        add("buffer", path, value)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Traced:
    """A trace, and what it is about.

    Args:
        trace: graph and facts; its inputs are the tensors among `inputs`, then what else the program reaches.
        inputs: what the graph shall take.
        returned: how the result is put together.
        requires_grad: whether each result requires grad.
        cloned: results that were cloned, to be tensors of their own.
    """

    trace: Traced
    inputs: tuple[_Input, ...]
    returned: Returned
    requires_grad: tuple[bool, ...]
    cloned: frozenset[int]

    def primals(self) -> list[tuple[PrimalIdx, _Input]]:
        """The tensors among the inputs, with their positions among those of the trace."""
        tensors = (leaf for leaf in self.inputs if isinstance(leaf.value, torch.Tensor))
        row: Row[PrimalIdx, _Input] = Row(tensors)
        return list(row.enumerate())

    def outputs(self) -> list[OutputFact]:
        """What each result is, and after the results each tensor that is assigned to an attribute."""
        return list(self.trace.facts.outputs)[:-1]


def _trace(
    call: _Call,
    decompositions: Mapping[OpOverload, Callable[..., Any]],
    *,
    loss: int | None = None,
    fresh: Collection[int] = (),
) -> _Traced:
    """Trace the call, with an input of its own for every name of a parameter.

    Args:
        call: the call.
        decompositions: operators to break up.
        loss: which result is the loss, if any.
        fresh: results to clone, so that they are nothing but results.
    """
    given: list[torch.Tensor] = []
    requires_grad: list[bool] = []
    tied = call.tied()

    def run(*args: Any, **kwargs: Any) -> Any:
        with swapped([state for _, state in tied], [given[position] for position, _ in tied]):
            return call.target(*args, **kwargs)

    with ExitStack() as scope, disable(), collector_paused():
        captured = capture(call.target, run, call.args, call.kwargs, Settings(), scope)
        inputs = (*(leaf for leaf, _ in call.state), *_arguments(captured))
        tensors = [leaf for leaf in inputs if isinstance(leaf.value, torch.Tensor)]
        own = {id(leaf.value): position for position, (leaf, _) in reversed(list(enumerate(call.state)))}
        strays = [state for state in captured.environment.state if id(state.value) not in own]
        own |= {id(state.value): len(tensors) + k for k, state in enumerate(strays)}

        def fn(*stand_ins: torch.Tensor) -> list[Any]:
            given[:] = stand_ins
            arguments = stand_ins[len(call.state) : len(tensors)]
            state = (stand_ins[own[id(tensor.value)]] for tensor in captured.environment.state)
            outs = captured.program.fn(*arguments, *state)
            _check_loss(outs, loss)
            requires_grad[:] = [isinstance(out, torch.Tensor) and out.requires_grad for out in outs]
            return [out.clone() if position in fresh else out for position, out in enumerate(outs)]

        slots = [Slot("primal", item.path) for item in (*tensors, *strays)]
        examples = [item.value for item in (*tensors, *strays)]
        for slot, example in zip(slots, examples, strict=True):
            _refuse_example(slot.path, example)
        program: Program[PrimalIdx] = Program(fn, Row(slots), Row(examples))
        recorder = Recorder(decompositions)
        recorder.draws.allow(captured.environment.reached.generators)
        traced = trace(
            program,
            recorder,
            training=torch.is_grad_enabled(),
            name_closed_over=captured.name_closed_over,
        )
    *_, last = traced.facts.outputs
    if not isinstance(last, NotATensor) or not isinstance(last.value, Returned):
        raise InternalError("the program did not say how to put its result back", stage="joint")
    _refuse_strays(traced, len(tensors))
    _refuse_metadata_writes(traced)
    return _Traced(traced, inputs, last.value, tuple(requires_grad[:-1]), frozenset(fresh))


def _arguments(captured: Captured) -> Iterator[_Input]:
    """The leaves of the arguments."""
    tensors = iter(captured.program.examples)
    for leaf in captured.arguments.leaves:
        value = leaf.value if isinstance(leaf, ConstantLeaf) else next(tensors)
        yield _Input(leaf.path, value, "argument")


# --- the graph ------------------------------------------------------------------------------------


class _Assembly:
    """Puts the exported graph together out of a trace.

    Args:
        traced: the trace.
        prefix: how the inputs are called.
        loss: the result that gets a gradient of one. Without, each result that requires grad gets a tangent.
    """

    def __init__(self, traced: _Traced, *, prefix: str, loss: int | None = None) -> None:
        self._traced = traced
        self._facts = traced.trace.facts
        self._results = traced.trace.graph.named_results()
        self._arguments = traced.trace.graph.named_placeholders()
        self._builder = GraphBuilder(traced.trace.graph.gm)
        self._add_inputs(prefix)
        if loss is None:
            self._add_tangents()
        for node in traced.trace.graph.gm.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if loss is not None and self._is_due(node):
                self._add_seed(loss)
            self._copy(node)
        if loss is not None and not self._has_tangents():
            self._add_seed(loss)

    def values(self) -> list[Any]:
        """The program's results: nodes, and constants."""
        return [self._value(OutIdx(position)) for position in range(self._traced.returned.spec.num_leaves)]

    def new_values(self) -> dict[_Input, Node]:
        """The new value of each input that is written or assigned."""
        assigned = self._assigned()
        found: dict[_Input, Node] = {}
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

    def gradients(self) -> dict[_Input, Node]:
        """The gradient of each input that has one."""
        slots = self._traced.trace.program.ins
        nodes = ((leaf, self._results.get(Slot("grad", slots[i].path))) for i, leaf in self._traced.primals())
        return self._distinct({leaf: self._builder.env[node] for leaf, node in nodes if node is not None})

    def module(self, results: Sequence[Any]) -> GraphModule:
        """The graph with these results, and nothing that they do not need."""
        gm = self._builder.finish(results, (), ()).gm
        gm.graph.eliminate_dead_code()
        return gm

    def _copy(self, node: Node) -> None:
        """Copy a node; it is called as PyTorch calls it."""
        if node.op == "get_attr":
            self._builder.copy(node)
            return
        args, kwargs = map_arg((node.args, node.kwargs), self._builder.env.__getitem__)
        new = self._builder.graph.create_node(node.op, node.target, args, kwargs, operator_name(node.target))
        new.meta = dict(node.meta)
        self._builder.env[node] = new

    def _add_inputs(self, prefix: str) -> None:
        slots = {leaf: self._traced.trace.program.ins[idx] for idx, leaf in self._traced.primals()}
        first = 0 if prefix.startswith("arg") else 1
        for number, leaf in enumerate(self._traced.inputs, start=first):
            new = self._builder.graph.placeholder(prefix.format(number))
            if leaf in slots:
                old = self._arguments[slots[leaf]]
                new.meta = dict(old.meta)
                self._builder.env[old] = new
            else:
                new.meta["val"] = leaf.value

    def _tangents(self) -> list[Node]:
        """The tangents of the trace, in the order of the results."""
        fresh = [fact.value for fact in self._traced.outputs() if isinstance(fact, Fresh)]
        outs = [self._facts.node_outs[value] for value in fresh]
        return [self._arguments[Slot("tangent", out.slot.path)] for out in outs if out.differentiable]

    def _add_tangents(self) -> None:
        for number, old in enumerate(self._tangents(), start=1):
            new = self._builder.graph.placeholder(f"tangents_{number}")
            new.meta = dict(old.meta)
            self._builder.env[old] = new

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

    def _value(self, position: OutIdx) -> Any:
        """The new node of a result, or the constant that it is."""
        match self._facts.outputs[position]:
            case NotATensor(value=value):
                return value
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
        """The value of an input once the program is over."""
        match self._facts.inputs[idx]:
            case DataWritten(value=value):
                return self._node_out(value)
            case Untouched():
                return self._builder.env[self._arguments[self._traced.trace.program.ins[idx]]]
            case _ as unknown:
                assert_never(unknown)

    def _replayed(self, base: Node, steps: Sequence[ViewStep]) -> Node:
        """The view of `base` that `steps` make."""
        for step in steps:
            with no_modes(), self._traced.trace.fake_mode:
                val = step.op(base.meta["val"], *step.args, **dict(step.kwargs))
            name = operator_name(step.op) or "view"
            made = self._builder.call(step.op, (base, *step.args), like=base, name=name, val=val)
            made.kwargs = dict(step.kwargs)
            if step.pick is not None:
                item, picked = operator.getitem, val[step.pick]
                made = self._builder.call(item, (made, step.pick), like=made, name="getitem", val=picked)
            base = made
        return base

    def _assigned(self) -> dict[str, OutIdx]:
        """Places that the program assigns a tensor to, and the result that has it."""
        returned = self._traced.returned
        found: dict[str, OutIdx] = {}
        position = returned.spec.num_leaves
        for source, spec in returned.assigned:
            if not spec.is_leaf():
                raise UnsupportedProgram(
                    f"`{source.path}` is assigned a container of tensors",
                    stage="export",
                    fix="return the tensors",
                )
            found[source.path] = OutIdx(position)
            position += 1
        return found

    def _distinct(self, nodes: dict[_Input, Node]) -> dict[_Input, Node]:
        """The same with a copy of each node that is there twice: signatures go by names."""
        seen: set[Node] = set()
        found: dict[_Input, Node] = {}
        for leaf, node in nodes.items():
            if node in seen:
                clone = torch.ops.aten.clone.default
                found[leaf] = self._builder.call(clone, (node,), like=node, name="clone")
            else:
                found[leaf] = node
            seen.add(found[leaf])
        return found


def _signature(
    gm: GraphModule,
    traced: _Traced,
    in_spec: TreeSpec,
    mutated: Sequence[_Input],
    graded: Sequence[_Input],
    loss: int | None,
) -> GraphSignature:
    """Names of what a graph takes and returns.

    Args:
        gm: the graph.
        traced: what it is of.
        in_spec: structure of state and arguments.
        mutated: inputs whose new values are the first results.
        graded: inputs whose gradients are the last results.
        loss: which result of the program is the loss, if any.
    """
    ins = {
        leaf: node.name
        for leaf, node in zip(traced.inputs, gm.graph.find_nodes(op="placeholder"), strict=True)
    }
    results = cast("tuple[Any, ...]", gm.graph.output_node().args[0])
    outs = [value.name if isinstance(value, Node) else None for value in results]
    values = outs[len(mutated) : len(mutated) + traced.returned.spec.num_leaves]
    new_values = dict(zip(mutated, outs, strict=False))
    grads = dict(zip(graded, outs[len(mutated) + len(values) :], strict=True))

    def of(kind: str, names: Mapping[_Input, Any]) -> dict[str, str]:
        """Graph name to the input's own name, for inputs of one kind."""
        of_kind = {leaf: name for leaf, name in names.items() if leaf.kind == kind}
        return {name: ins[leaf] if kind == "argument" else leaf.path for leaf, name in of_kind.items()}

    backward = None
    if loss is not None:
        params = of("parameter", grads) | of("buffer", grads)
        backward = BackwardSignature(params, of("argument", grads), str(values[loss]))
    return GraphSignature(
        parameters=[leaf.path for leaf in ins if leaf.kind == "parameter"],
        buffers=[leaf.path for leaf in ins if leaf.kind == "buffer"],
        user_inputs=list(of("argument", ins)),
        user_outputs=values,
        inputs_to_parameters=of("parameter", ins),
        inputs_to_buffers=of("buffer", ins),
        buffers_to_mutate=of("buffer", new_values),
        parameters_to_mutate=of("parameter", new_values),
        user_inputs_to_mutate=of("argument", new_values),
        in_spec=in_spec,
        out_spec=traced.returned.spec,
        backward_signature=backward,
        input_tokens=[],
        output_tokens=[],
    )


# --- what is refused ------------------------------------------------------------------------------


def _refuse_options(**options: bool) -> None:
    for name, is_set in options.items():
        if is_set:
            raise BadSettings(
                f"`{name}` cannot be honoured",
                fix="leave it out: sizes are static, and graphs are recorded below autograd",
            )


def _refuse_example(path: str, example: torch.Tensor) -> None:
    if not isinstance(recipe_of(example), Plain):
        raise UnsupportedProgram(
            f"`{path}` is a {type(example).__name__}",
            stage="export",
            fix="export a program of plain tensors: a graph alone cannot take a wrapper apart",
        )
    if not is_real(example):
        raise UnsupportedProgram(f"`{path}` holds no data", stage="export", fix="pass a real tensor")


def _refuse_strays(traced: Traced, num_given: int) -> None:
    """Refuse a program that uses a tensor which is neither argument nor state."""
    arguments = traced.graph.named_placeholders()
    returned = {
        fact.input if isinstance(fact, IsInput) else fact.base
        for fact in traced.facts.outputs
        if isinstance(fact, (IsInput, ViewOfInput))
    }
    for idx, slot in traced.program.ins.enumerate():
        if idx >= num_given and (arguments[slot].users or idx in returned):
            raise UnsupportedProgram(
                f"`{slot}` is reached from outside: neither argument nor parameter nor buffer",
                stage="export",
                fix="register it as a buffer of the module, or pass it as an argument",
            )


def _refuse_metadata_writes(traced: Traced) -> None:
    for idx in (*(write.input for write in traced.facts.metadata), *traced.facts.switched_on):
        raise UnsupportedProgram(
            f"`{traced.program.ins[idx]}` has its size, strides or history written in place",
            stage="export",
            fix="return the changed tensor instead",
        )


def _refuse_writes(traced: _Traced, *, joint: bool) -> None:
    facts, primals = traced.trace.facts, traced.primals()
    for write in facts.backward_writes:
        raise UnsupportedProgram(
            f"`{traced.trace.program.ins[write.input]}` is written by the backward",
            stage="export",
            fix="write it in the forward, or export without `trace_joint`",
        )
    for idx, leaf in primals:
        if not isinstance(facts.inputs[idx], DataWritten):
            continue
        if joint and leaf.requires_grad():
            raise UnsupportedProgram(
                f"`{leaf.path}` is written and requires grad",
                stage="export",
                fix="write a clone, or export without `trace_joint`",
            )
        for other, sharing in primals:
            if other != idx and share_memory(leaf.value, sharing.value):
                raise UnsupportedProgram(
                    f"`{leaf.path}` is written and shares memory with `{sharing.path}`",
                    stage="export",
                    fix="clone one of them",
                )


def _without_gradient(leaf: _Input) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"`{leaf.path}` requires grad, and the loss does not depend on it",
        stage="export",
        fix="call `requires_grad_(False)` on it",
    )


def _check_loss(outs: Sequence[Any], loss: int | None) -> None:
    """Refuse results that do not fit `output_loss_index`."""
    if loss is None:
        return
    values = outs[: outs[-1].spec.num_leaves]
    chosen = values[loss] if 0 <= loss < len(values) else None
    if not isinstance(chosen, torch.Tensor) or not chosen.requires_grad or chosen.numel() != 1:
        raise BadSettings(
            f"result {loss} is no loss: that is a tensor of one number which requires grad",
            stage="export",
            fix="let `output_loss_index` be the position of the loss among the results",
        )
    for position, out in enumerate(values):
        if out is not chosen and isinstance(out, torch.Tensor) and out.requires_grad:
            raise UnsupportedProgram(
                f"`out[{position}]` requires grad and is not the loss",
                stage="export",
                fix="return it detached",
            )


def _is_flat(structure: TreeSpec) -> bool:
    return not structure.is_leaf() and all(child.is_leaf() for child in tree_children(structure))


def _not_simple(fault: str) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"`aot_export_joint_simple` cannot keep the function's convention: {fault}",
        stage="export",
        fix="clone or flatten it, or use `aot_export_module`",
    )


def _refuse_what_is_not_simple(traced: _Traced) -> None:
    facts, slots = traced.trace.facts, traced.trace.program.ins
    for idx, fact in facts.inputs.enumerate():
        if isinstance(fact, DataWritten):
            raise _not_simple(f"`{slots[idx]}` is written")
    for write in facts.backward_writes:
        raise _not_simple(f"`{slots[write.input]}` is written by the backward")
    for source, _ in traced.returned.assigned:
        raise _not_simple(f"`{source.path}` is assigned a tensor")
    if not _is_flat(traced.returned.spec):
        raise _not_simple("the result is not one flat tuple of tensors and constants")
    for position, fact in enumerate(traced.outputs()):
        requires_grad = traced.requires_grad[position]
        match fact:
            case IsInput(input=idx) | ViewOfInput(base=idx):
                raise _not_simple(f"`out[{position}]` is `{slots[idx]}`, or a view of it")
            case ViewOfIntermediate() if requires_grad:
                raise _not_simple(f"`out[{position}]` is a view")
            case ViewOfOutput(base=base, steps=steps) if requires_grad and steps:
                raise _not_simple(f"`out[{position}]` is a view of `out[{base}]`")
            case _:
                pass
