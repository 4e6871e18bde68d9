"""How much memory of a graph is alive at once."""

from __future__ import annotations

import itertools
from collections.abc import Container

import torch
from torch.fx import Node

from aotdist.partition.traits import storage_root, value_bytes
from aotdist.program import Graph, Slot
from aotdist.torch_seam.operators import OpOverload, writes_arguments


def most_bytes_alive(graph: Graph, handed_over: Container[Slot] = ()) -> int:
    """The most bytes that are there at once of what a graph makes, and of what it is handed over.

    Args:
        graph: in the order in which it runs.
        handed_over: arguments that are freed after their last use; others keep the rest.
    """
    nodes = list(graph.gm.graph.nodes)
    held = {node for slot, node in graph.named_placeholders().items() if slot in handed_over}
    last_use = {node: at for at, node in enumerate(nodes) if node in held or _makes_memory(node)}
    for at, node in enumerate(nodes):
        used = (_owner(source) for source in node.all_input_nodes)
        last_use.update({owner: at for owner in used if owner in last_use})
    change = [0] * (len(nodes) + 1)
    for at, node in enumerate(nodes):
        if node in last_use:
            change[0 if node in held else at] += value_bytes(node)
            change[last_use[node] + 1] -= value_bytes(node)
    return max(itertools.accumulate(change))


def _makes_memory(node: Node) -> bool:
    is_made = node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
    return is_made and _owner(node) is node


def _owner(node: Node) -> Node:
    """Whose memory a result lies in: its own, or that of what it is a view of, or is written to."""
    root = storage_root(node)
    while isinstance(root.target, OpOverload) and writes_arguments(root.target):
        root = storage_root(root.all_input_nodes[0])
    return root
