"""Outputs lie in memory of their own as in the user's program, whatever a rewrite of its graph made of them.

Inductor drops operators that change nothing: of `x + zeros` it leaves `x`. An output that was computed so
would be another output, an argument or a saved value by another name, and be written whenever that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch.fx import Node

from aotdist.partition.storage import view_base
from aotdist.program import Graph

_CLONE = torch.ops.aten.clone.default


@dataclass(frozen=True, slots=True)
class Memory:
    """Whose memory results lie in, before a rewrite.

    Args:
        nodes: of the graph.
        owners: for each result, the node that allocates it.
    """

    nodes: frozenset[Node]
    owners: tuple[Node | None, ...]


def memory_of(graph: Graph) -> Memory:
    """What `restore_own_memory` asks for; the nodes are those that the rewrite is about to change."""
    return Memory(frozenset(graph.gm.graph.nodes), tuple(map(_owner, graph.results())))


def restore_own_memory(graph: Graph, before: Memory) -> None:
    """Copy outputs that had memory of their own, and now lie in that of a node with other uses, in place.

    What a rewrite computes anew is its own. So is what has no other use: nobody can tell.
    """
    results = list(graph.results())
    owners = [_owner(node) for node in results]
    for at, (slot, owner, owned) in enumerate(zip(graph.outs, owners, before.owners, strict=True)):
        if slot.role != "output" or owner is None or owner is owned or owner not in before.nodes:
            continue
        if owner.op != "call_function" or len(owner.users) > 1 or owners.count(owner) > 1:
            results[at] = _copied(graph, cast("Node", results[at]))
    graph.gm.graph.output_node().args = (tuple(results),)


def _owner(node: Node | None) -> Node | None:
    return None if node is None else view_base(node)


def _copied(graph: Graph, node: Node) -> Node:
    with graph.gm.graph.inserting_before(graph.gm.graph.output_node()):
        copy = graph.gm.graph.call_function(_CLONE, (node,))
    copy.meta = dict(node.meta)
    return copy
