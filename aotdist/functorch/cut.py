"""The partition's two halves, joined into one joint graph that the pipeline later cuts at the same place.

The graph carries a `Cut`, by which the backend gives both halves PyTorch's order of arguments and results.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from aotdist.codegen.contract import BoxedCall
from aotdist.errors import UnsupportedProgram
from aotdist.functorch.convention import Order, flat_results
from aotdist.partition.builder import GraphBuilder
from aotdist.partition.halves import find_halves
from aotdist.partition.traits import is_view, storage_root
from aotdist.passes.collectives import collectives
from aotdist.program import Graph, Slot
from aotdist.torch_seam.proxies import graph_module
from aotdist.torch_seam.symbols import SYMBOLIC


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
