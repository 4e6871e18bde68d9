"""The collectives of a graph: what a report lists, and what ranks compare before they run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from aotdist.partition.storage import value_bytes
from aotdist.partition.traits import is_collective, is_wait
from aotdist.program import Graph
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

    def fingerprint(self) -> tuple[str, str, int, str]:
        """What every rank of the group must agree on: operator, dtype, element count, reduction or sender."""
        numel = -1 if self.op in _UNEVEN else self.numel
        sender = "" if self.sender is None else f"from {self.sender}"
        return (self.op, self.dtype, numel, self.reduce_op or sender)


def collectives(graph: Graph) -> tuple[Collective, ...]:
    """Every collective of the graph, in the order in which they start."""
    return tuple(_describe(node) for node in graph.gm.graph.nodes if is_collective(node))


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


def _describe(node: Node) -> Collective:
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
    )


def _tensors_of(argument: Any) -> list[torch.Tensor]:
    nodes = argument if isinstance(argument, (list, tuple)) else [argument]
    values = [node.meta.get("val") for node in nodes if isinstance(node, Node)]
    return [value for value in values if isinstance(value, torch.Tensor)]
