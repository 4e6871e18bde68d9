"""The graphs of an artifact as a page shows them: nodes, what is saved between them, who waits for whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from aotdist.codegen.python_source import tensor_text
from aotdist.partition.traits import is_collective, is_getitem, is_view, is_wait, phase_of, value_bytes
from aotdist.passes.collectives import collectives
from aotdist.program import Graph, Slot, Split
from aotdist.report import words
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
        sequence: what a backward node has in common with its forward node, if it has one.
        reads: positions of the nodes that it reads.
        results: what it is to the graph: an argument, a result, in words.
        is_saved: whether it is handed from forward to backward.
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
        num_operations: how many of them compute.
        source: what runs it, as its backend prints it; nothing for a joint graph.
    """

    name: str
    nodes: tuple[GraphNode, ...]
    num_operations: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that is handed from forward to backward.

    Args:
        name: of the tensor.
        node: its node in the joint graph, if it is there.
        type: `f32[8, 16]`.
        bytes: of its elements.
        module: where it is computed.
        note: what there is to say of it.
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
        node: that starts it.
        beside: operators that run between its start and the first wait for it.
        readers: operators that wait: the first to compute with what it gives.
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
    """A graph by its name; `split` is what was made of the joint one, `source` what runs it."""
    # In the backward, what is saved is an argument.
    saved = () if split is None or name == "backward" else split.saved
    phase = "backward" if name == "backward" else "forward"
    return GraphDetails(name, tuple(_nodes(graph, saved, phase)), num_operations(graph), source)


def num_operations(graph: Graph) -> int:
    """How large a graph is, in every report: arguments and the output are not counted."""
    return sum(node.op not in ("placeholder", "output") for node in graph.gm.graph.nodes)


def _nodes(graph: Graph, saved: Iterable[Slot], default_phase: str) -> Iterator[GraphNode]:
    nodes = [node for node in graph.gm.graph.nodes if node.op != "output"]
    position = {node: at for at, node in enumerate(nodes)}
    kept = {slot.path for slot in saved}
    said = _said(graph)
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
            results=tuple(said.get(node, ())),
            is_saved=_saved_path(node) in kept,
        )


def _said(graph: Graph) -> dict[Node, list[str]]:
    """What nodes are to their graph."""
    said = {node: [words.argument(slot)] for slot, node in graph.named_placeholders().items()}
    for slot, node in graph.named_results().items():
        if node is not None and slot.role != "saved":
            said.setdefault(node, []).append(words.result(slot))
    return said


def _saved_path(node: Node) -> str:
    """What the partition calls a value that the forward computes for the backward."""
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
    """What a node computes: a tensor, several of them, or nothing that has a text."""
    if isinstance(value, torch.Tensor):
        return tensor_text(value.dtype, value.shape)
    if isinstance(value, (tuple, list)):
        return ", ".join(filter(None, map(_value_text, value)))
    return ""


def saved_details(joint: Graph, split: Split) -> tuple[Saved, ...]:
    """What is saved, inputs last: they are there anyway."""
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
    """The collectives of the graphs that run, which the joint one does not."""
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
    """The nodes that compute with a result, or with views of it."""
    for user in node.users:
        if is_view(user) or is_getitem(user):
            yield from _readers(user)
        elif user.op != "output":
            yield user


def _computes(node: Node) -> bool:
    """Whether running it takes time, and is neither a collective nor a wait for one."""
    return node.op == "call_function" and not (
        is_view(node) or is_getitem(node) or is_wait(node) or is_collective(node)
    )
