"""The graphs of an artifact as the page shows them: nodes, saved tensors, collectives and their overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from aotdist.codegen.python_source import tensor_text
from aotdist.partition.traits import is_collective, is_getitem, is_view, is_wait, phase_of, value_bytes
from aotdist.passes.collectives import collectives
from aotdist.program import Graph, Role, Slot, Split
from aotdist.torch_seam.operators import OpOverload


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node.

    Args:
        name: in its graph.
        operator: what it calls.
        type: of its result.
        bytes: of its result.
        phase: `forward` or `backward`.
        kind: `input`, `call`, `collective` or `wait`.
        module: path of the innermost module; empty outside of all.
        source: the user's line.
        sequence: autograd's sequence number, the same for a forward node and its backward nodes.
        reads: positions of the nodes that it reads.
        results: which argument and which results of the graph it is, in words.
        is_saved: whether it is saved for the backward.
    """

    name: str
    operator: str
    type: str
    bytes: int
    phase: str
    kind: str
    module: str
    source: str
    sequence: int | None
    reads: tuple[int, ...]
    results: tuple[str, ...]
    is_saved: bool


@dataclass(frozen=True, slots=True)
class GraphDetails:
    """A graph: `joint`, `forward`, `backward` or `inference`.

    Args:
        name: which of these.
        nodes: its nodes.
        num_operations: how many nodes are neither arguments nor the output.
        source: the code that its backend printed; empty for a joint graph.
    """

    name: str
    nodes: tuple[GraphNode, ...]
    num_operations: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that is saved for the backward.

    Args:
        name: of the tensor.
        node: its node in the joint graph, if it is there.
        type: `f32[8, 16]`.
        bytes: of its elements.
        module: path of the module that computes it.
        note: whether it is an input, or a view of another node.
    """

    name: str
    node: str | None
    type: str
    bytes: int
    module: str
    note: str


@dataclass(frozen=True, slots=True)
class CollectiveDetails:
    """A collective of a graph that runs.

    Args:
        graph: name of the graph.
        operator: `all_gather_into_tensor`.
        group: name and size of the process group.
        bytes: of the larger side.
        unit: the FSDP unit that it serves, or nothing.
        node: the node that starts it.
        beside: number of operators that run between its start and the first wait for it.
        readers: the operators that first compute with its result.
    """

    graph: str
    operator: str
    group: str
    bytes: int
    unit: str
    node: str
    beside: int
    readers: tuple[str, ...]


def graph_details(name: str, graph: Graph, split: Split | None, source: str) -> GraphDetails:
    """The details of a graph; `split` is the partition of the joint graph, `source` the code that runs it."""
    # In the backward, saved values are arguments.
    saved = () if split is None or name == "backward" else split.saved
    phase = "backward" if name == "backward" else "forward"
    return GraphDetails(name, tuple(_nodes(graph, saved, phase)), num_operations(graph), source)


def num_operations(graph: Graph) -> int:
    """How many nodes a graph has in reports: without its arguments and the output."""
    return sum(node.op not in ("placeholder", "output") for node in graph.gm.graph.nodes)


def _nodes(graph: Graph, saved: Iterable[Slot], default_phase: str) -> Iterator[GraphNode]:
    nodes = [node for node in graph.gm.graph.nodes if node.op != "output"]
    position = {node: at for at, node in enumerate(nodes)}
    kept = {slot.path for slot in saved}
    roles = _roles(graph)
    for node in nodes:
        sequence = node.meta.get("seq_nr", -1)
        yield GraphNode(
            name=node.name,
            operator=_operator(node),
            type=_value_text(node.meta.get("val")),
            bytes=value_bytes(node),
            phase=phase_of(node) or default_phase,
            kind=_kind(node),
            module=node.meta.get("module") or "",
            source=node.meta.get("source") or "",
            sequence=sequence if sequence >= 0 else None,
            reads=tuple(position[read] for read in node.all_input_nodes),
            results=tuple(roles.get(node, ())),
            is_saved=_saved_path(node) in kept,
        )


def _roles(graph: Graph) -> dict[Node, list[str]]:
    """Which arguments and results of the graph nodes are, in words."""
    roles = {
        node: [_ARGUMENTS.get(slot.role, "{}").format(slot)]
        for slot, node in graph.named_placeholders().items()
    }
    for slot, node in graph.named_results().items():
        if node is not None and slot.role != "saved":
            roles.setdefault(node, []).append(_RESULTS.get(slot.role, "{}").format(slot))
    return roles


_ARGUMENTS: dict[Role, str] = {
    "primal": "input `{}`",
    "size": "size `{}`",
    "saved": "saved `{}`",
    "tangent": "gradient of `{}`, from outside",
    "total": "whole gradient of `{}`, as it goes on",
    "buffer": "`{}` as the backward finds it",
    "rng": "`{}` of the random numbers",
}
_RESULTS: dict[Role, str] = {
    "output": "output `{}`",
    "write": "new value of `{}`",
    "total": "whole gradient of `{}`",
    "grad": "gradient of `{}`",
    "piece": "summand of the gradient of `{}`",
    "backward_write": "new value of `{}`, written in backward",
    "kept": "tensor {} of those that the backward keeps",
    "saved": "saved for the backward",
}


def _saved_path(node: Node) -> str:
    """The path that the partition gives to a saved value that the forward computes."""
    return f"%{node.name}"


def _kind(node: Node) -> str:
    if node.op == "placeholder":
        return "input"
    if is_collective(node):
        return "collective"
    return "wait" if is_wait(node) else "call"


def _operator(node: Node) -> str:
    if node.op == "placeholder":
        return "placeholder"
    if isinstance(node.target, OpOverload) or not callable(node.target):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def _value_text(value: Any) -> str:
    """The type of a tensor, or of several; empty for anything else."""
    if isinstance(value, torch.Tensor):
        return tensor_text(value.dtype, value.shape)
    if isinstance(value, (tuple, list)):
        return ", ".join(filter(None, map(_value_text, value)))
    return ""


def saved_details(joint: Graph, split: Split) -> tuple[Saved, ...]:
    """What is saved, largest first, then the inputs, which take no more memory."""
    primals = {str(slot) for slot in split.saved_primals}
    return tuple(sorted(_saved(joint, split), key=lambda one: (one.name in primals, -one.bytes)))


def _saved(joint: Graph, split: Split) -> Iterator[Saved]:
    nodes = {_saved_path(node): node for node in joint.gm.graph.nodes}
    nodes |= {str(slot): node for slot, node in joint.named_placeholders().items() if slot.role == "primal"}
    for slot, node in split.backward.named_placeholders().items():
        if slot.role != "saved":
            continue
        found = nodes.get(str(slot))
        note = ""
        if slot in split.saved_primals:
            note = "an input: nothing more is kept"
        elif found is not None and is_view(found):
            note = f"a view of {found.all_input_nodes[0].name}"
        yield Saved(
            name=str(slot).removeprefix("%"),
            node=None if found is None else found.name,
            type=_value_text(node.meta.get("val")),
            bytes=value_bytes(node),
            module="" if found is None else found.meta.get("module") or "",
            note=note,
        )


def collective_details(graphs: Mapping[str, Graph]) -> Iterator[CollectiveDetails]:
    """The collectives of the graphs that run: of all but the joint graph."""
    for name, graph in graphs.items():
        if name != "joint":
            yield from _collectives(name, graph)


def _collectives(graph_name: str, graph: Graph) -> Iterator[CollectiveDetails]:
    nodes = list(graph.gm.graph.nodes)
    position = {node: at for at, node in enumerate(nodes)}
    named = {node.name: node for node in nodes}
    for found in collectives(graph):
        start = named[found.node]
        waits = sorted(_waits(start), key=position.__getitem__)
        between = nodes[position[start] + 1 : position[waits[0]]] if waits else []
        readers = sorted({reader for wait in waits for reader in _readers(wait)}, key=position.__getitem__)
        size = "" if found.group_size is None else f" ({found.group_size} ranks)"
        yield CollectiveDetails(
            graph=graph_name,
            operator=found.op,
            group=f"{found.group}{size}",
            bytes=found.num_bytes,
            unit=found.unit or "",
            node=found.node,
            beside=sum(_computes(node) for node in between),
            readers=tuple(reader.name for reader in readers),
        )


def _waits(start: Node) -> Iterator[Node]:
    """The nodes that wait for a collective, or for its parts."""
    for user in start.users:
        if is_wait(user):
            yield user
        elif is_getitem(user):
            yield from _waits(user)


def _readers(node: Node) -> Iterator[Node]:
    """The nodes that compute with a value, or with views of it."""
    for user in node.users:
        if is_view(user) or is_getitem(user):
            yield from _readers(user)
        elif user.op != "output":
            yield user


def _computes(node: Node) -> bool:
    """Whether a node is an operator that takes time, and neither a collective nor a wait."""
    return node.op == "call_function" and not (
        is_view(node) or is_getitem(node) or is_wait(node) or is_collective(node)
    )
