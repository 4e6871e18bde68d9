"""Partitions of joint graphs: functions from one `GraphModule` to two, in PyTorch's convention.

The two halves that the user's partition returns are joined into one joint graph, which the pipeline later
cuts at the same place. That graph carries a `Cut`, by which the backend gives both halves PyTorch's order of
arguments and results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from aotdist.codegen.contract import BoxedCall
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.functorch.convention import Order, flat_results
from aotdist.partition.builder import GraphBuilder
from aotdist.partition.halves import find_halves
from aotdist.partition.policy import Policy, partition
from aotdist.partition.traits import is_view, storage_root
from aotdist.passes.collectives import collectives
from aotdist.program import Graph, Slot
from aotdist.torch_seam.proxies import graph_module
from aotdist.torch_seam.symbols import SYMBOLIC

PartitionFn = Callable[..., tuple[GraphModule, GraphModule]]
"""`(joint_module, (primals, tangents), *, num_fwd_outputs, static_lifetime_input_indices)` -> both halves."""


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
        static_lifetime_input_indices: ignored.
        static_lifetime_input_nodes: ignored.
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
    """Save the fewest bytes, and recompute cheap operations in the backward.

    Args:
        joint_module: a joint graph, ours or PyTorch's.
        compiler: whose operations are cheap; only `inductor` is known.
        num_fwd_outputs: how many of its results are the forward's.
        static_lifetime_input_indices: ignored.

    Raises:
        BadSettings: `compiler` is another one.
    """
    if compiler != "inductor":
        raise BadSettings(
            f"min_cut_rematerialization_partition(compiler={compiler!r}) is not known", fix='pass "inductor"'
        )
    return _partition_module(joint_module, num_fwd_outputs, "min_cut")


def _partition_module(gm: GraphModule, num_values: int, policy: Policy) -> tuple[GraphModule, GraphModule]:
    """Cut a joint graph in PyTorch's convention; both halves keep that convention."""
    joint, constants = _as_joint(gm, num_values)
    split = partition(joint, policy)
    builder = GraphBuilder(split.forward.gm)
    for node in split.forward.placeholders():
        builder.placeholder(node)
    builder.copy_all(n for n in split.forward.gm.graph.nodes if n.op not in ("placeholder", "output"))
    arguments, results = split.forward.named_placeholders(), split.forward.named_results()
    primals = split.saved_primals
    saved = [arguments[primals[slot]] if slot in primals else results[slot] for slot in split.saved]
    sizes = [slot for slot in split.backward.ins if slot.role == "size"]
    saved += [arguments[slot] for slot in sizes]
    nodes = [*list(split.forward.results())[:num_values], *saved]
    new = [constants.get(k) if node is None else builder.env[node] for k, node in enumerate(nodes)]
    taken = split.backward.named_placeholders()
    for slot in reversed(sizes):  # PyTorch's backwards take sizes first
        next(iter(split.backward.gm.graph.nodes)).prepend(taken[slot])
    return builder.finish(new, (), ()).gm, split.backward.gm


def _as_joint(gm: GraphModule, num_values: int) -> tuple[Graph, dict[int, Any]]:
    """Convert a joint graph of PyTorch's convention to ours; also returns results that are constants."""
    builder = GraphBuilder(gm)
    overwritten = _overwritten(gm)
    ins: list[Slot] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            ins.append(Slot(_argument_role(node), node.name))
            builder.placeholder(node).meta["overwritten"] = node in overwritten
        elif node.op != "output":
            builder.copy(node)
        if node.op != "output":
            builder.env[node].meta.setdefault("phase", "backward" if _is_tagged_late(node) else "forward")
    flat = flat_results(gm)
    results = [builder.env[value] if isinstance(value, Node) else None for value in flat]
    outs = [Slot("output" if k < num_values else "grad", f"out[{k}]") for k in range(len(flat))]
    constants = {k: value for k, value in enumerate(flat[:num_values]) if not isinstance(value, Node)}
    return builder.finish(results, ins, outs), constants


def _overwritten(gm: GraphModule) -> set[Node]:
    """The arguments that the forward overwrites, so that the backward cannot read their old values.

    The forward either returns the new value, which PyTorch's description of the result says, or calls
    `copy_`.

    Raises:
        UnsupportedProgram: the backward writes one of them too, and would be given its old value.
    """
    found = {node for node in gm.graph.find_nodes(op="placeholder") if node.meta.get("overwritten")}
    described = {node.meta.get("desc"): node for node in gm.graph.find_nodes(op="placeholder")}
    for desc in gm.graph.output_node().meta.get("desc") or ():
        written = getattr(desc, "mutated_input", None)
        found |= {described[written]} if written is not None and written in described else set()
    copies = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    found |= {copy.args[0] for copy in copies if not _is_tagged_late(copy)}
    for copy in copies:
        if copy.args[0] in found and _is_tagged_late(copy):
            raise UnsupportedProgram(
                f"the joint graph writes `{copy.args[0]}` in the forward and in the backward",
                stage="partition",
                fix="trace it with `aotdist.aot_function`, whose graphs return new values",
            )
    return found


def _is_tagged_late(node: Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def _argument_role(node: Node) -> Literal["primal", "size", "tangent"]:
    if "tangents" in str(node.target):
        return "tangent"
    if isinstance(node.meta.get("val"), torch.SymInt):
        return "size"
    if "seed" in str(node.target):
        raise UnsupportedProgram(
            f"the joint graph takes `{node.name}`, the state of a random generator",
            stage="partition",
            fix="trace it without functionalized random operators",
        )
    return "primal"


@dataclass(slots=True, eq=False)
class Cut:
    """How the user's partition has cut a joint graph; it lies in the `meta` of the graph's placeholders.

    Args:
        order: of arguments and results in PyTorch's graphs.
        saved: saved values, in the order in which the forward returns them.
        taken: saved values, in the order in which the backward takes them: PyTorch's move sizes ahead.
        communicates: whether the graph contains collectives.
        backward: graph and call of the backward for all tangents, once it exists.
    """

    order: Order
    saved: tuple[Slot, ...]
    taken: tuple[Slot, ...]
    communicates: bool
    backward: tuple[Graph, BoxedCall] | None = None


_CUT = "aotdist_cut"
_NAME = "aotdist_name"
"""Keys of `meta`, hidden from the user's compilers: the `Cut`; the partition's name of a saved value."""


def _kept(value: torch.Tensor) -> torch.Tensor:
    """A no-op behind a view that the partition saves, which our own cut would otherwise recompute.

    Reports count the view's bytes as if it were a copy.
    """
    return value


def joined(forward: GraphModule, backward: GraphModule, joint: Graph, order: Order) -> Graph:
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
    reshaped = {slot for slot, node in joint.named_placeholders().items() if node.meta.get("reshaped")}
    changed = overwritten | {node for node, slot in primal_of.items() if slot in reshaped}
    slots: dict[Node, Slot] = {}
    """The slot of each saved value, by the backward's argument for it."""
    handed = _paired(saved, taken)
    for node, old in handed.items():
        builder.env[old] = _handed_over(builder, node, changed)
        primal = None if node in overwritten else primal_of.get(node)
        if primal is None:
            slots[old] = Slot("saved", f"%{builder.env[old].name}")
        else:
            slots[old] = primal if primal.role == "size" else Slot("saved", primal.path, primal.inner)
    constants |= _copy_half(builder, backward, "backward", constants)
    results = dict(zip(order.values, flat_results(forward), strict=False))  # what is saved comes after these
    results |= zip(order.grads, flat_results(backward), strict=True)
    nodes = [results[slot] for slot in joint.outs]
    builder.graph.output(tuple(None if node is None else builder.env[node] for node in nodes))
    in_turn = [slots[handed[node]] for node in saved], [slots[old] for old in taken if old in slots]
    cut = Cut(
        order,
        *(tuple(dict.fromkeys(names)) for names in in_turn),
        communicates=bool(collectives(joint)),
    )
    for node in builder.graph.find_nodes(op="placeholder"):
        node.meta[_CUT] = cut
    return Graph(graph_module(constants, builder.graph), (*order.primals, *order.tangents), joint.outs)


def _paired(saved: Sequence[Node], taken: Sequence[Node]) -> dict[Node, Node]:
    """Each saved value with the backward's argument for it; tensors and sizes are ordered separately."""
    taken = taken[: len(saved)]
    pairs: dict[Node, Node] = {}
    for symbolic in (False, True):
        given, wanted = (
            [node for node in nodes if isinstance(node.meta.get("val"), SYMBOLIC) == symbolic]
            for nodes in (saved, taken)
        )
        pairs.update(zip(given, wanted, strict=True))
    return pairs


def _saved_nodes(forward: GraphModule, backward: GraphModule, order: Order) -> list[Node]:
    """The saved values that the forward returns.

    Raises:
        UnsupportedProgram: the halves do not keep PyTorch's convention.
    """
    handed_over = flat_results(forward)[len(order.values) :]
    saved = [value for value in handed_over if isinstance(value, Node)]
    primals = len(forward.graph.find_nodes(op="placeholder"))
    taken = len(backward.graph.find_nodes(op="placeholder"))
    expected = len(handed_over) + len(order.tangents)
    _check_counts("forward takes", primals, len(order.primals), "primals")
    _check_counts("backward takes", taken, expected, "saved values and tangents")
    _check_counts("backward returns", len(flat_results(backward)), len(order.grads), "gradients")
    _check_counts("forward saves", len(saved), len(handed_over), "tensors among these")
    return saved


def _copy_half(
    builder: GraphBuilder, gm: GraphModule, phase: str, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Copy a half's operations; returns its constants, renamed where `known` has another of that name."""
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


def _handed_over(builder: GraphBuilder, node: Node, changed: Collection[Node]) -> Node:
    """The node that the backward reads for a saved value."""
    new = builder.env[node]
    if not is_view(node):
        return new
    # An argument that is written after the forward holds other data by then, and a view of an argument that
    # is reshaped has a history that autograd would replay.
    copies = storage_root(node) in changed
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


def is_computed(saved: Slot) -> bool:
    """Whether the forward computes a saved value; otherwise it is an argument of the forward."""
    return saved.path.startswith("%")


def is_cut(graph: Graph) -> bool:
    """Whether the graph was made from one that the user's partition has cut."""
    return any(_CUT in node.meta for node in graph.placeholders())


def cut_of(graph: Graph) -> Cut:
    """The `Cut` that `joined` put into the placeholders' `meta`."""
    return next(node.meta[_CUT] for node in graph.placeholders() if _CUT in node.meta)


def with_arguments(
    graph: Graph, ins: Sequence[Slot], outs: Sequence[Slot], name: str, *, first: int = 1
) -> GraphModule:
    """A copy of a graph with these arguments and results, in this order; a result may be absent.

    Arguments are named by `name` and number, saved values as the partition named them. A slot of a saved
    argument may be among the results.
    """
    builder = GraphBuilder(graph.gm)
    arguments = graph.named_placeholders()
    numbers = iter(range(first, first + len(ins)))
    for slot in ins:
        node = arguments[slot]
        own = node.meta.get(_NAME, node.name)
        keeps_name = slot.role == "saved" or (slot.role == "size" and graph.is_backward())
        new = builder.graph.placeholder(own if keeps_name else name.format(next(numbers)))
        new.meta = dict(node.meta)
        builder.env[node] = new
    for node in graph.gm.graph.nodes:
        if node.target is _kept:
            builder.env[node] = builder.env[node.all_input_nodes[0]]
        elif node.op not in ("placeholder", "output"):
            builder.copy(node)
    results = graph.named_results()
    saved = {Slot("saved", slot.path, slot.inner): node for slot, node in arguments.items()} | {
        slot: node for slot, node in arguments.items() if slot.role == "size"
    }
    for node in builder.graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if key not in (_CUT, _NAME)}
    found = [results.get(slot, saved.get(slot)) for slot in outs]
    return builder.finish([None if node is None else builder.env[node] for node in found], (), ()).gm
