"""The collectives of a graph: what a report lists, and what ranks compare before they run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from aotdist.partition.traits import is_collective, is_wait, value_bytes
from aotdist.program import Graph
from aotdist.torch_seam.nodes import inputs_of
from aotdist.torch_seam.operators import OpOverload, argument_names
from aotdist.torch_seam.symbols import estimate

_UNEVEN = frozenset({"all_to_all_single"})
"""Operators whose ranks may legitimately bring different element counts."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a graph, in the order in which it starts.

    Args:
        op: operator name without its namespace, `all_gather_into_tensor`.
        group: name of the process group.
        group_size: number of ranks in it, when the operator says.
        reduce_op: `sum`, `avg` ..., when it reduces.
        dtype: of what is sent, as torch prints it.
        numel: elements that this rank sends.
        num_bytes: bytes of the larger side: what is gathered, or what is reduced.
        unit: the FSDP unit that it serves, if any.
        node: name of the node that starts it.
        source: the user's line, if known.
        sender: the rank that sends, when only one does.
        serves: names of the parameters and buffers that it gathers, or whose gradients it reduces, as they
            lie in it.
    """

    op: str
    group: str
    group_size: int | None
    reduce_op: str | None
    dtype: str
    numel: int
    num_bytes: int
    unit: str | None
    node: str
    source: str | None
    sender: int | None = None
    serves: tuple[str, ...] = ()

    def fingerprint(self) -> tuple[str, str, int, str, tuple[str, ...]]:
        """What every rank of the group must agree on.

        Operator, dtype, element count, reduction or sender, and what lies in it.
        """
        numel = -1 if self.op in _UNEVEN else self.numel
        sender = "" if self.sender is None else f"from {self.sender}"
        return (self.op, self.dtype, numel, self.reduce_op or sender, self.serves)


def collectives(graph: Graph, state: Collection[str] = ()) -> tuple[Collective, ...]:
    """Every collective of the graph, in the order in which they start.

    Args:
        graph: the graph.
        state: paths of the parameters and buffers that `serves` may name.
    """
    starts = graph.calls(is_collective)
    served = _served(graph, frozenset(state)) if starts and state else {}
    return tuple(_describe(node, served.get(node, ())) for node in starts)


def reads_of_state(graph: Graph, state: Collection[str]) -> tuple[str, ...]:
    """Parameters and buffers in the order of first use: where a value of them alone meets another value."""
    made = _made_of_state(graph, frozenset(state), behind_collectives=True)
    read: dict[str, None] = {}
    for node in graph.gm.graph.nodes:
        if node not in made and node.op != "output":
            read.update((path, None) for given in node.all_input_nodes for path in made.get(given, ()))
    return tuple(read)


def arguments(node: Node) -> dict[str, Any]:
    """The node's arguments by the names that its operator's schema gives them."""
    assert isinstance(node.target, OpOverload), f"{node.name} calls no operator"
    return {**dict(zip(argument_names(node.target), node.args, strict=False)), **node.kwargs}


def wait_of(start: Node) -> Node | None:
    """The one node that waits for the collective, if there is exactly one."""
    waits = [user for user in start.users if is_wait(user)]
    return waits[0] if len(waits) == 1 else None


def group_name(node: Node) -> str:
    """Name of the process group that a collective runs in."""
    group = arguments(node)["group_name"]
    return group if isinstance(group, str) else str(getattr(group, "group_name", group))


def _made_of_state(
    graph: Graph, state: Collection[str], *, behind_collectives: bool
) -> dict[Node, tuple[str, ...]]:
    """Nodes that are computed from state alone, each with the paths of that state in order."""
    made: dict[Node, tuple[str, ...]] = {
        node: (slot.path,)
        for slot, node in graph.named_placeholders().items()
        if slot.role == "primal" and slot.path in state
    }
    for node in graph.gm.graph.nodes:
        inputs = inputs_of(node)
        if node.op != "call_function" or not inputs.keys() <= made.keys():
            continue
        if behind_collectives or not any(map(is_collective, inputs)):
            made[node] = tuple(dict.fromkeys(path for one in inputs for path in made[one]))
    return made


def _served(graph: Graph, state: Collection[str]) -> Mapping[Node, tuple[str, ...]]:
    """For collectives that hold state or its gradients, and nothing else, the paths in their order."""
    made = _made_of_state(graph, state, behind_collectives=False)
    served = {node: made[node] for node in made if is_collective(node)}
    gradients: dict[Node, list[tuple[tuple[int, ...], str]]] = {}
    places = _places_in_collectives(graph)
    for slot, node in graph.named_results().items():
        if node in places and slot.role == "grad" and slot.path in state:
            start, *place = places[node]
            gradients.setdefault(start, []).append((tuple(place), slot.path))
    return served | {start: tuple(path for _, path in sorted(found)) for start, found in gradients.items()}


def _places_in_collectives(graph: Graph) -> dict[Node, tuple[Any, ...]]:
    """Nodes computed from one collective alone: which, and the position of each user on the way from it.

    By these positions, parts of its result have an order, whatever is done to one of them afterwards.
    """
    places: dict[Node, tuple[Any, ...]] = {start: (start,) for start in graph.calls(is_collective)}
    pending = [*places]
    for giver in pending:  # which grows
        for number, user in enumerate(giver.users):
            if len(inputs_of(user)) == 1 and not is_collective(user):
                places[user] = (*places[giver], number)
                pending.append(user)
    return places


def _describe(node: Node, serves: tuple[str, ...]) -> Collective:
    named = arguments(node)
    sent = _tensors_of(named.get("input", named.get("inputs")))
    assert isinstance(node.target, OpOverload)
    return Collective(
        op=node.target.name().partition("::")[2].partition(".")[0],
        group=group_name(node),
        group_size=named.get("group_size"),
        reduce_op=named.get("reduce_op"),
        dtype=str(sent[0].dtype).removeprefix("torch.") if sent else "none",
        numel=sum(estimate(tensor.numel()) for tensor in sent),
        num_bytes=max(value_bytes(node), sum(estimate(t.numel()) * t.element_size() for t in sent)),
        unit=node.meta.get("unit"),
        node=node.name,
        source=node.meta.get("source"),
        sender=named.get("src"),
        serves=serves,
    )


def _tensors_of(argument: Any) -> list[torch.Tensor]:
    nodes = argument if isinstance(argument, (list, tuple)) else [argument]
    values = [node.meta.get("val") for node in nodes if isinstance(node, Node)]
    return [value for value in values if isinstance(value, torch.Tensor)]
