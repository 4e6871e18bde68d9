"""`functorch.compile`'s entry points, on aotdist's own stages: bring a compiler and a partition of your own.

A compiler is given `(graph_module, fake_arguments)` and returns a callable, boxed if it has a true attribute
`_boxed_call`. It is asked for a backward when that runs for the first time; ahead of time if the program
communicates. A partition is given `(joint_module, (primals, tangents), num_fwd_outputs=...)` and returns the
forward and the backward module; PyTorch's own are accepted too. All graphs keep PyTorch's conventions:

- joint: `primals_1, ..., tangents_1, ...` -> new values of written inputs, results, a gradient, or None, for
  each primal;
- forward: `primals_1, ...` -> new values of written inputs, results, saved values;
- backward: saved values, `tangents_1, ...` -> a gradient, or None, for each primal;
- inference: `arg0_1, ...` -> new values of written inputs, results.

Where this differs from PyTorch's: only tensors are arguments and results of graphs, and a result that is an
input or a view is made outside of them; a closed-over tensor is one more argument, and gets its gradient; a
call that the compiled program does not fit (another shape, grad mode, constant) is compiled once more,
instead of running what does not fit; a gradient that is None in eager is None.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from aotdist.api import CompiledFunction, disable
from aotdist.codegen.backend import CallableBackend, Compiler
from aotdist.codegen.contract import BoxedCall, Decompositions, Emission, Emitted, Kind
from aotdist.codegen.fx import print_graph
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.partition.builder import GraphBuilder
from aotdist.partition.halves import find_halves
from aotdist.partition.policy import Policy, partition
from aotdist.partition.storage import storage_root
from aotdist.partition.traits import is_view
from aotdist.passes.collectives import collectives
from aotdist.passes.order import PASS_NAMES
from aotdist.passes.run import run_passes
from aotdist.program import Graph, Slot
from aotdist.settings import Settings
from aotdist.subclasses.protocol import is_real
from aotdist.torch_seam import (
    OpOverload,
    call_with_primals_and_tangents,
    graph_module,
    operator_name,
    tracing_context,
)

__all__ = [
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "default_partition",
    "make_boxed_compiler",
    "make_boxed_func",
    "min_cut_rematerialization_partition",
    "nop",
    "print_compile",
]

PartitionFn = Callable[..., tuple[GraphModule, GraphModule]]
"""`(joint_module, (primals, tangents), *, num_fwd_outputs, static_lifetime_input_indices)` -> both halves."""


# --- compilers ------------------------------------------------------------------------------------


def make_boxed_func(f: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    """`f(*args)` as a call that takes its arguments as one list."""

    @functools.wraps(f, updated=())
    def boxed(args: list[Any]) -> Any:
        return f(*args)

    cast(Any, boxed)._boxed_call = True
    return boxed


def make_boxed_compiler(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A compiler whose result is boxed, from one whose result is not."""

    @functools.wraps(compiler)
    def boxing(fx_g: GraphModule, inps: Any) -> Any:
        return make_boxed_func(compiler(fx_g, inps))

    return boxing


@make_boxed_compiler
def nop(fx_g: GraphModule, _: Any) -> GraphModule:
    """The compiler that leaves a graph as it is."""
    return fx_g


@make_boxed_compiler
def print_compile(fx_g: GraphModule, _: Any) -> GraphModule:
    """The compiler that prints a graph's code and leaves it as it is."""
    print(fx_g.code)
    return fx_g


# --- partitions -----------------------------------------------------------------------------------


def default_partition(
    joint_module: GraphModule,
    _joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    static_lifetime_input_nodes: Collection[Node] | None = None,
) -> tuple[GraphModule, GraphModule]:
    """Keep eager's schedule and save what eager saves.

    Args:
        joint_module: a joint graph, ours or PyTorch's.
        num_fwd_outputs: how many of its results are the forward's.
        static_lifetime_input_indices: arguments that stay at their place; makes no difference here.
        static_lifetime_input_nodes: the same as nodes.
    """
    return _partition_module(joint_module, num_fwd_outputs, "default")


def min_cut_rematerialization_partition(
    joint_module: GraphModule,
    _joint_inputs: Any,
    compiler: str = "inductor",
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
) -> tuple[GraphModule, GraphModule]:
    """Save the fewest bytes and compute cheap operations once more.

    Args:
        joint_module: a joint graph, ours or PyTorch's.
        compiler: which operations are cheap; only `inductor`'s are known.
        num_fwd_outputs: how many of its results are the forward's.
        static_lifetime_input_indices: arguments that stay at their place; makes no difference here.

    Raises:
        BadSettings: `compiler` is another one.
    """
    if compiler != "inductor":
        raise BadSettings(
            f"min_cut_rematerialization_partition(compiler={compiler!r}) is not known", fix='pass "inductor"'
        )
    return _partition_module(joint_module, num_fwd_outputs, "min_cut")


def _partition_module(gm: GraphModule, num_values: int, policy: Policy) -> tuple[GraphModule, GraphModule]:
    """Cut a joint graph in PyTorch's convention into two in the same."""
    joint, constants = _as_joint(gm, num_values)
    split = partition(joint, policy)
    builder = GraphBuilder(split.forward.gm)
    for node in split.forward.placeholders():
        builder.placeholder(node)
    builder.copy_all(n for n in split.forward.gm.graph.nodes if n.op not in ("placeholder", "output"))
    arguments, results = split.forward.named_placeholders(), split.forward.named_results()
    primals = split.saved_primals
    saved = [arguments[primals[slot]] if slot in primals else results[slot] for slot in split.saved]
    nodes = [*list(split.forward.results())[:num_values], *saved]
    new = [constants.get(k) if node is None else builder.env[node] for k, node in enumerate(nodes)]
    return builder.finish(new, (), ()).gm, split.backward.gm


def _as_joint(gm: GraphModule, num_values: int) -> tuple[Graph, dict[int, Any]]:
    """A joint graph in PyTorch's convention as one of ours, and the results that are constants."""
    builder = GraphBuilder(gm)
    ins: list[Slot] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            ins.append(Slot(_argument_role(node), node.name))
            builder.placeholder(node)
        elif node.op != "output":
            builder.copy(node)
        if node.op != "output":
            late = node.meta.get("partitioner_tag") == "is_backward"
            builder.env[node].meta.setdefault("phase", "backward" if late else "forward")
    flat = _results(gm)
    results = [builder.env[value] if isinstance(value, Node) else None for value in flat]
    outs = [Slot("output" if k < num_values else "grad", f"out[{k}]") for k in range(len(flat))]
    constants = {k: value for k, value in enumerate(flat[:num_values]) if not isinstance(value, Node)}
    return builder.finish(results, ins, outs), constants


def _argument_role(node: Node) -> Literal["primal", "tangent"]:
    if "tangents" in str(node.target):
        return "tangent"
    if isinstance(node.meta.get("val"), torch.SymInt) or "seed" in str(node.target):
        raise UnsupportedProgram(
            f"the joint graph takes `{node.name}`, a size or the state of a random generator",
            stage="partition",
            fix="trace it with static shapes and without functionalized random operators",
        )
    return "primal"


def _results(gm: GraphModule) -> list[Any]:
    """What a module returns, flat; nodes or constants."""
    (values,) = gm.graph.output_node().args
    return list(values) if isinstance(values, (tuple, list)) else [values]


# --- conventions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Order:
    """The order in which PyTorch's graphs take and return what ours do.

    Args:
        primals: what a forward takes.
        tangents: what a joint graph takes after that.
        values: what a forward returns: new values of inputs, in their order, then results.
        grads: what a backward returns: a gradient for each primal, if it has one, then what else there is.
    """

    primals: tuple[Slot, ...]
    tangents: tuple[Slot, ...]
    values: tuple[Slot, ...]
    grads: tuple[Slot, ...]

    @classmethod
    def of(cls, joint: Graph) -> _Order:
        """That of a joint or an inference graph."""
        primals = tuple(slot for slot in joint.ins if slot.role == "primal")
        outs = set(joint.outs)
        writes = [slot for slot in (Slot("write", p.path, p.inner) for p in primals) if slot in outs]
        grads = dict.fromkeys(Slot("grad", primal.path, primal.inner) for primal in primals)
        # A plain primal may have a wrapper for a gradient, of several plain tensors.
        more = (s for s in joint.outs if s.role in ("grad", "backward_write") and s not in grads)
        return cls(
            primals,
            tuple(slot for slot in joint.ins if slot.role == "tangent"),
            (*writes, *(slot for slot in joint.outs if slot.role == "output")),
            (*grads, *more),
        )


_TAGS = {"must_save": CheckpointPolicy.MUST_SAVE, "must_recompute": CheckpointPolicy.MUST_RECOMPUTE}


def _joint_module(joint: Graph, order: _Order) -> GraphModule:
    """The joint graph as PyTorch's partitions want it: names, order, tags; called `(primals, tangents)`."""
    builder = GraphBuilder(joint.gm)
    arguments = joint.named_placeholders()
    tangents = {arguments[slot] for slot in order.tangents}
    for prefix, slots in (("primals", order.primals), ("tangents", order.tangents)):
        _add_arguments(builder, {f"{prefix}_{k}": arguments[slot] for k, slot in enumerate(slots, start=1)})
    _copy_operations(builder, joint.gm)
    for old, new in builder.env.items():
        late = old.meta.get("phase") == "backward" or old in tangents
        new.meta["partitioner_tag"] = "is_backward" if late else "is_forward"
        if old.meta.get("policy") in _TAGS:
            new.meta |= {"recompute": _TAGS[old.meta["policy"]], "ac_graph_id": 0}
    results = joint.named_results()
    nodes = [results.get(slot) for slot in (*order.values, *order.grads)]
    gm = builder.finish([None if n is None else builder.env[n] for n in nodes], (), ()).gm
    call_with_primals_and_tangents(gm, len(order.primals), len(order.values))
    return gm


def _add_arguments(builder: GraphBuilder, nodes: Mapping[str, Node]) -> None:
    """An argument of another name for each."""
    for name, node in nodes.items():
        new = builder.graph.placeholder(name)
        new.meta = dict(node.meta)
        builder.env[node] = new


def _named_as_theirs(gm: GraphModule) -> GraphModule:
    """A copy whose nodes are called as PyTorch calls them."""
    builder = GraphBuilder(gm)
    for node in gm.graph.find_nodes(op="placeholder"):
        builder.placeholder(node)
    _copy_operations(builder, gm)
    return builder.finish([None if n is None else builder.env[n] for n in _results(gm)], (), ()).gm


def _copy_operations(builder: GraphBuilder, gm: GraphModule) -> None:
    """All of a graph but arguments and results; nodes are called as PyTorch calls them."""
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            builder.copy(node)
        elif node.op not in ("placeholder", "output"):
            args, kwargs = map_arg((node.args, node.kwargs), builder.env.__getitem__)
            new = builder.graph.create_node(node.op, node.target, args, kwargs, operator_name(node.target))
            new.meta = dict(node.meta)
            builder.env[node] = new


class _Cut:
    """What is known of a joint graph that the user's partition has cut; its arguments carry it along.

    Attributes:
        order: what PyTorch's graphs take and return.
        saved: what the forward hands over, in the partition's order.
        communicates: whether the graph holds collectives.
        backward: the backward for all tangents, once there is one: its graph and its call.
    """

    def __init__(self, order: _Order, saved: tuple[Slot, ...], *, communicates: bool) -> None:
        self.order = order
        self.saved = saved
        self.communicates = communicates
        self.backward: tuple[Graph, BoxedCall] | None = None


_CUT = "aotdist_cut"
_NAME = "aotdist_name"
"""Keys of nodes' `meta`, which no compiler sees: the cut; what the partition calls a saved value."""


def _kept(value: torch.Tensor) -> torch.Tensor:
    """Stands behind a view that the partition saves; left alone, a view would be made again from its base.

    Reports count the view's bytes as if it were a copy.
    """
    return value


def _joined(forward: GraphModule, backward: GraphModule, joint: Graph, order: _Order) -> Graph:
    """The two halves as one joint graph, which the default policy cuts where the partition did.

    Raises:
        UnsupportedProgram: the halves do not keep PyTorch's convention.
    """
    saved = _saved_nodes(forward, backward, order)
    taken = backward.graph.find_nodes(op="placeholder")
    builder = GraphBuilder(forward)
    arguments = forward.graph.find_nodes(op="placeholder")
    for node in (*arguments, *taken[len(saved) :]):
        builder.placeholder(node)
    constants = _copy_half(builder, forward, "forward", {})
    primal_of = dict(zip(arguments, order.primals, strict=True))
    written = find_halves(joint).written
    at_risk = {slot for slot, node in joint.named_placeholders().items() if node in written}
    overwritten = {node for node, slot in primal_of.items() if slot in at_risk}
    slots: list[Slot] = []
    for old, node in zip(taken, saved, strict=False):
        builder.env[old] = _handed_over(builder, node, overwritten)
        primal = None if node in overwritten else primal_of.get(node)
        name = f"%{builder.env[old].name}"
        slots.append(Slot("saved", name) if primal is None else Slot("saved", primal.path, primal.inner))
    constants |= _copy_half(builder, backward, "backward", constants)
    results = dict(zip(order.values, _results(forward), strict=False))  # what is saved comes after these
    results |= zip(order.grads, _results(backward), strict=True)
    nodes = [results[slot] for slot in joint.outs]
    builder.graph.output(tuple(None if node is None else builder.env[node] for node in nodes))
    cut = _Cut(order, tuple(dict.fromkeys(slots)), communicates=bool(collectives(joint)))
    for node in builder.graph.find_nodes(op="placeholder"):
        node.meta[_CUT] = cut
    return Graph(graph_module(constants, builder.graph), (*order.primals, *order.tangents), joint.outs)


def _saved_nodes(forward: GraphModule, backward: GraphModule, order: _Order) -> list[Node]:
    """What the forward hands over, once it is clear that both keep the convention."""
    handed_over = _results(forward)[len(order.values) :]
    saved = [value for value in handed_over if isinstance(value, Node)]
    primals = len(forward.graph.find_nodes(op="placeholder"))
    taken = len(backward.graph.find_nodes(op="placeholder"))
    expected = len(handed_over) + len(order.tangents)
    _check_counts("forward takes", primals, len(order.primals), "primals")
    _check_counts("backward takes", taken, expected, "saved values and tangents")
    _check_counts("backward returns", len(_results(backward)), len(order.grads), "gradients")
    _check_counts("forward saves", len(saved), len(handed_over), "tensors among these")
    return saved


def _copy_half(
    builder: GraphBuilder, gm: GraphModule, phase: str, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Copy a half's operations; returns its constants by name, none of which is another in `known`."""
    constants: dict[str, Any] = {}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        builder.copy(node)
        new = builder.env[node]
        new.meta["phase"] = phase
        new.meta.pop("policy", None)  # the partition has decided
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(gm)
            same = known.get(str(node.target), value) is value
            new.target = str(node.target) if same else f"of_the_{phase}_{node.name}"
            constants[new.target] = value
    return constants


def _handed_over(builder: GraphBuilder, node: Node, overwritten: Collection[Node]) -> Node:
    """What the backward starts from in the place of a saved value."""
    new = builder.env[node]
    if not is_view(node):
        return new
    # What lies in an argument that is written after the forward has other data by then.
    copies = storage_root(node) in overwritten
    target = torch.ops.aten.clone.default if copies else _kept
    return builder.call(target, (new,), like=new, name=node.name, **{_NAME: node.name})


def _check_counts(what: str, found: int, expected: int, kind: str) -> None:
    if found != expected:
        raise _bad_partition(f"its {what} {found} values where there are {expected} {kind}")


def _bad_partition(fault: str) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"the partition function does not keep the convention: {fault}",
        stage="partition",
        fix="return a forward that takes the primals and returns `num_fwd_outputs` values and then what it "
        "saves, and a backward that takes the saved values and then all tangents",
    )


# --- codegen --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FunctorchBackend:
    """Cuts joint graphs with the user's partition, and hands graphs to the user's compilers.

    Args:
        compilers: what the user brought.
        partition_fn: cuts the joint graph.
        num_params_buffers: how many of the first tensors are parameters and buffers.
        settings: for what happens before the cut.
    """

    compilers: CallableBackend
    partition_fn: PartitionFn
    num_params_buffers: int = 0
    settings: Settings = field(default_factory=Settings.from_environment)
    name: str = "functorch"
    partition: Literal["default", "min_cut"] = "default"
    any_strides: bool = False

    def check(self) -> None:
        """Nothing that could be known here."""

    def decompositions(self) -> Decompositions:
        """The user's table."""
        return self.compilers.decompositions()

    def prepare_joint(self, graph: Graph) -> Graph:
        """Clean the graph up and let the user's partition cut it, if it is a joint one."""
        joint, _ = run_passes(graph, "joint", self.settings)
        order = _Order.of(joint)
        if not order.tangents:
            return replace(joint, gm=_named_as_theirs(joint.gm))
        module = _joint_module(joint, order)
        vals = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        count = len(order.primals)
        halves = self.partition_fn(
            module,
            (vals[:count], vals[count:]),
            num_fwd_outputs=len(order.values),
            static_lifetime_input_indices=list(range(min(self.num_params_buffers, count))),
        )
        return _joined(*halves, joint, order)

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        """Compile a copy of the graph in PyTorch's convention."""
        source = print_graph(graph).source
        match emission.kind:
            case "inference":
                order = _Order.of(graph)
                gm = _with_arguments(graph, graph.ins, order.values, "arg{}_1", first=0)
                return self._emit(gm, graph, order.values, emission, source)
            case "forward":
                cut = _cut_of(graph)
                outs = frozenset(graph.outs)
                slots = (*cut.order.values, *(s for s in cut.saved if not _is_computed(s) or s in outs))
                gm = _with_arguments(graph, graph.ins, slots, "primals_{}")
                return self._emit(gm, graph, slots, emission, source)
            case "backward":
                return Emitted(self._backward(graph, emission), source)

    def _emit(
        self, gm: GraphModule, graph: Graph, slots: Sequence[Slot], emission: Emission, source: str
    ) -> Emitted:
        picks = _picks(slots, graph.outs)
        call, strides = self._compile(gm, emission)
        chosen = None if strides is None else tuple(strides[pick] for pick in picks)
        return Emitted(lambda args: _picked(call(args), picks), source, chosen)

    def _backward(self, graph: Graph, emission: Emission) -> BoxedCall:
        """The backward, compiled when it is called for the first time, as PyTorch does.

        Ahead of time if the program communicates: ranks must not find out in the middle of a step that one
        cannot compile it. With tangents missing it is the same one again, see `_with_zeros`.
        """
        cut = _cut_of(graph)
        if cut.backward is not None:
            return _with_zeros(*cut.backward, graph)
        position = _positions(graph.ins)
        ins = [slot for slot in (*cut.saved, *cut.order.tangents) if slot in position]
        gm = _with_arguments(graph, ins, cut.order.grads, "tangents_{}")
        sources = [position[slot] for slot in ins]
        picks = _picks(cut.order.grads, graph.outs)
        compiled = functools.cache(lambda: self._compile(gm, emission)[0])
        if cut.communicates:
            compiled()

        def call(args: list[Any]) -> list[Any]:
            taken = [args[source] for source in sources]
            args.clear()
            return _picked(compiled()(taken), picks)

        cut.backward = graph, call
        return call

    def _compile(self, gm: GraphModule, emission: Emission) -> tuple[BoxedCall, list[Any] | None]:
        """The user's callable, boxed, and the strides of its results where the compiler says them."""
        examples = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        compiler = _compiler_of(self.compilers, emission.kind)
        with disable(), tracing_context(emission.fake_mode) as context:
            compiled = compiler(gm, examples)
        strides = context.output_strides
        return _boxed(compiled), list(strides) if strides else None


def _positions(slots: Sequence[Slot]) -> dict[Slot, int]:
    return {slot: position for position, slot in enumerate(slots)}


def _picks(there: Sequence[Slot], wanted: Sequence[Slot]) -> list[int]:
    """Where each slot that is wanted stands."""
    position = _positions(there)
    return [position[slot] for slot in wanted]


def _is_computed(saved: Slot) -> bool:
    """Whether the forward computes a saved value; the others are its arguments."""
    return saved.path.startswith("%")


def _cut_of(graph: Graph) -> _Cut:
    """What `_joined` left with the graph's arguments: tangents, and what is saved of primals."""
    return next(node.meta[_CUT] for node in graph.placeholders() if _CUT in node.meta)


def _with_arguments(
    graph: Graph, ins: Sequence[Slot], outs: Sequence[Slot], name: str, *, first: int = 1
) -> GraphModule:
    """A copy of a graph that takes and returns these slots, in this order; a result may be absent.

    Arguments that are no saved values are called by `name` and number. A saved argument is a result, too.
    """
    builder = GraphBuilder(graph.gm)
    arguments = graph.named_placeholders()
    numbers = iter(range(first, first + len(ins)))
    for slot in ins:
        node = arguments[slot]
        own = node.meta.get(_NAME, node.name)
        new = builder.graph.placeholder(own if slot.role == "saved" else name.format(next(numbers)))
        new.meta = dict(node.meta)
        builder.env[node] = new
    for node in graph.gm.graph.nodes:
        if node.target is _kept:
            builder.env[node] = builder.env[node.all_input_nodes[0]]
        elif node.op not in ("placeholder", "output"):
            builder.copy(node)
    results = graph.named_results()
    saved = {Slot("saved", slot.path, slot.inner): node for slot, node in arguments.items()}
    for node in builder.graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key not in (_CUT, _NAME)}
    found = [results.get(slot, saved.get(slot)) for slot in outs]
    return builder.finish([None if node is None else builder.env[node] for node in found], (), ()).gm


def _compiler_of(compilers: CallableBackend, kind: Kind) -> Compiler:
    match kind:
        case "forward":
            return compilers.compiler
        case "backward":
            return compilers.backward_compiler or compilers.compiler
        case "inference":
            return compilers.inference_compiler or compilers.compiler


def _boxed(compiled: Callable[..., Any]) -> BoxedCall:
    if getattr(compiled, "_boxed_call", False):
        return compiled

    def call(args: list[Any]) -> Any:
        taken = tuple(args)
        args.clear()
        return compiled(*taken)

    return call


def _picked(results: Any, picks: Sequence[int]) -> list[Any]:
    flat = results if isinstance(results, (tuple, list)) else (results,)
    return [flat[pick] for pick in picks]


def _with_zeros(whole: Graph, call: BoxedCall, reduced: Graph) -> BoxedCall:
    """A backward for which tangents are missing, by the one for all: a compiler is not asked a second time.

    Gradients that depend on nothing else are None, as in eager.
    """
    absent = {position for position, node in enumerate(reduced.results()) if node is None}
    arguments = [(slot, node.meta["val"]) for slot, node in whole.named_placeholders().items()]
    given = frozenset(reduced.ins)

    def filled(args: list[Any]) -> list[Any]:
        remaining = iter(args)
        all_of_them = [next(remaining) if slot in given else _zero_like(val) for slot, val in arguments]
        args.clear()
        return [None if at in absent else grad for at, grad in enumerate(call(all_of_them))]

    return filled


def _zero_like(val: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(val.size(), val.stride(), dtype=val.dtype, device=val.device).zero_()


# --- entry points ---------------------------------------------------------------------------------


def _refuse(**options: tuple[bool, str]) -> None:
    """Raise for the first option that is set and that nothing here could honour."""
    for name, (is_set, fix) in options.items():
        if is_set:
            raise BadSettings(f"`{name}` cannot be honoured", fix=fix)


class AotFunction(CompiledFunction):
    """A function whose graphs go through compilers, and a partition, that the user brought."""

    def __init__(self, fn: Callable[..., Any], backend: FunctorchBackend) -> None:
        # The user's compilers get what the user's partition returned: nothing changes a graph in between.
        settings = replace(backend.settings, partition="default", disabled_passes=frozenset(PASS_NAMES))
        super().__init__(fn, backend, settings)

    def compile_for(self, *args: Any) -> None:
        """Compile for a call with these arguments, without calling."""
        self._compile(args, {})


_WRITES_STAY = "leave it False: new values are results of the graph, and are copied to the inputs after it"
_STATIC = "leave it False: sizes are static, and another size is compiled anew"
_FUNCTIONAL = "leave it False: every graph is functional"


def aot_function(
    fn: Callable[..., Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: PartitionFn = default_partition,
    decompositions: Mapping[OpOverload, Callable[..., Any]] | None = None,
    num_params_buffers: int = 0,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    dynamic: bool = False,
    enable_log: bool = True,
    disable_functionalization: bool = False,
) -> AotFunction:
    """Compile a function with compilers of your own, at its first call.

    Args:
        fn: takes and returns any pytrees of tensors and constants.
        fw_compiler: compiles forwards.
        bw_compiler: compiles backwards, each when it runs for the first time, ahead of time if the program
            communicates; `fw_compiler` if None.
        partition_fn: cuts the joint graph in two.
        decompositions: operators that the trace must break up.
        num_params_buffers: how many of the first tensors are parameters and buffers; partitions are told.
        keep_inference_input_mutations: not available.
        inference_compiler: compiles programs without a backward; `fw_compiler` if None.
        dynamic: not available.
        enable_log: nothing is logged either way.
        disable_functionalization: not available.

    Raises:
        BadSettings: one of the options that are not available is set.
    """
    _refuse(
        dynamic=(dynamic, _STATIC),
        keep_inference_input_mutations=(keep_inference_input_mutations, _WRITES_STAY),
        disable_functionalization=(disable_functionalization, _FUNCTIONAL),
    )
    compilers = CallableBackend(fw_compiler, bw_compiler, inference_compiler, dict(decompositions or {}))
    return AotFunction(fn, FunctorchBackend(compilers, partition_fn, num_params_buffers))


class AotModule(nn.Module):
    """A module that runs the compiled call of another, whose parameters stay where they are.

    Args:
        mod: the other.
        compiled: takes its parameters and its buffers by name, then the arguments.
    """

    def __init__(self, mod: nn.Module, compiled: Callable[..., Any]) -> None:
        super().__init__()
        self.orig_module = mod
        self._compiled = compiled
        self._named_params = dict(mod.named_parameters(remove_duplicate=False))
        self._named_buffers = dict(mod.named_buffers(remove_duplicate=False))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled call."""
        return self._compiled(self._named_params, self._named_buffers, *args, **kwargs)


def aot_module(mod: nn.Module, *args: Any, **kwargs: Any) -> AotModule:
    """`aot_function` of a module: its parameters and buffers become the first arguments of the graphs.

    Args:
        mod: the module; it is not changed.
        args: of `aot_function`, without the function.
        kwargs: likewise.
    """

    def functional_call(
        named_params: Mapping[str, torch.Tensor],
        named_buffers: Mapping[str, torch.Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return torch.func.functional_call(mod, {**named_params, **named_buffers}, args, kwargs)

    named = [*mod.named_parameters(remove_duplicate=False), *mod.named_buffers(remove_duplicate=False)]
    distinct = len({id(tensor) for _, tensor in named})  # a tied one is one argument
    kwargs = {"num_params_buffers": distinct, **kwargs}
    return AotModule(mod, aot_function(functional_call, *args, **kwargs))


def aot_module_simplified(
    mod: nn.Module,
    args: Sequence[Any],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: PartitionFn = default_partition,
    decompositions: Mapping[OpOverload, Callable[..., Any]] | None = None,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    compiler_config_extra: Any = None,
    ignore_shape_env: bool = False,
    disable_functionalization: bool = False,
    pre_grad_passes: Callable[[GraphModule, Sequence[Any]], GraphModule] | None = None,
    compile_region_name: str | None = None,
) -> Callable[..., Any]:
    """Compile a module for flat arguments at once; its parameters are taken as they are now.

    Args:
        mod: returns a flat tuple or list.
        args: what it is called with. If these hold no data (a Dynamo backend's), the first call compiles.
        fw_compiler: compiles forwards.
        bw_compiler: compiles backwards; `fw_compiler` if None.
        partition_fn: cuts the joint graph in two.
        decompositions: operators that the trace must break up.
        keep_inference_input_mutations: not available.
        inference_compiler: compiles programs without a backward; `fw_compiler` if None.
        compiler_config_extra: not available; it belongs to a cache of PyTorch's.
        ignore_shape_env: makes no difference: sizes are static.
        disable_functionalization: not available.
        pre_grad_passes: applied to `mod`, if that is a graph module, before anything else.
        compile_region_name: names the compiled function.

    Returns:
        the compiled call: flat arguments to a list. It has the module's `zero_grad`, `named_parameters` and
        `named_buffers`.

    Raises:
        BadSettings: one of the options that are not available is set.
        UnsupportedProgram: the module returns something else than a tuple or a list.
    """
    _refuse(
        keep_inference_input_mutations=(keep_inference_input_mutations, _WRITES_STAY),
        compiler_config_extra=(compiler_config_extra is not None, "leave it out"),
        disable_functionalization=(disable_functionalization, _FUNCTIONAL),
    )
    if pre_grad_passes is not None and isinstance(mod, GraphModule):
        mod = pre_grad_passes(mod, args)
    named = [*mod.named_parameters(remove_duplicate=False), *mod.named_buffers(remove_duplicate=False)]
    names, state = [name for name, _ in named], [tensor for _, tensor in named]

    def flat_call(*flat: Any) -> Any:
        by_name = dict(zip(names, flat, strict=False))
        result = torch.func.functional_call(mod, by_name, flat[len(names) :])
        if not isinstance(result, (tuple, list)):
            raise UnsupportedProgram(
                f"the module returns a {type(result).__name__}, not a tuple or a list",
                stage="capture",
                fix="return a tuple, or use `aot_module`",
            )
        return list(result)

    flat_call.__name__ = compile_region_name or type(mod).__name__
    compilers = CallableBackend(fw_compiler, bw_compiler, inference_compiler, dict(decompositions or {}))
    distinct = len({id(tensor) for tensor in state})  # a tied one is one argument
    compiled = AotFunction(flat_call, FunctorchBackend(compilers, partition_fn, distinct))
    if all(is_real(arg) for arg in args if isinstance(arg, torch.Tensor)):
        compiled.compile_for(*state, *args)

    def forward(*runtime_args: Any) -> Any:
        return compiled(*state, *runtime_args)

    attached = cast(Any, forward)
    attached.zero_grad = mod.zero_grad
    attached.named_parameters = mod.named_parameters
    attached.named_buffers = mod.named_buffers
    return forward
