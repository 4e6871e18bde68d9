"""Computes what a step writes into its inputs as soon as the gradients for it are there.

An optimizer steps when the whole backward has run, but what it makes of one gradient needs no other, unless
they are clipped together. So an update is moved right behind the last node of the backward that it needs, and
its gradient is gone before the next layer's is made. Pure reordering: nothing that communicates, draws or may
raise is moved, nor is an update moved ahead of what may raise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.fx import Node

from aotdist.partition.traits import is_collective, is_effectful, is_random, is_wait, phase_of
from aotdist.program import Graph
from aotdist.settings import Settings


def early_updates(graph: Graph, settings: Settings) -> Graph:
    """The same nodes, with what is written behind the gradients that it needs."""
    differentiates = any(phase_of(node) == "backward" for node in graph.gm.graph.nodes)
    if not differentiates or not any(slot.role == "write" for slot in graph.outs):
        return graph
    ordered = graph.copied()
    nodes = list(ordered.gm.graph.nodes)
    at = {node: position for position, node in enumerate(nodes)}
    ready = _ready(at)
    earliest = next(at[node] for node in nodes if phase_of(node) == "backward")
    raising = max((at[node] for node in nodes if is_effectful(node) and not is_random(node)), default=0)
    named = ordered.named_results().items()
    written = [new for slot, new in named if slot.role == "write" and new is not None]
    moved: set[Node] = set()
    tails: dict[Node, Node] = {}
    for new in sorted(written, key=lambda new: ready[new]):
        if ready[new] >= earliest:
            behind = nodes[max(ready[new], raising)]
            needed = sorted(_needed(new, at[behind], at, moved), key=lambda node: at[node])
            for node in needed:
                tails.setdefault(behind, behind).append(node)
                tails[behind] = node
    return ordered


def _ready(at: Mapping[Node, int]) -> dict[Node, int]:
    """For each node the position of the last that it needs, itself included, of those that stay in place."""
    ready: dict[Node, int] = {}
    for node, position in at.items():
        computes = node.op == "call_function" and phase_of(node) != "backward"
        stays = not computes or is_wait(node) or is_collective(node) or is_effectful(node)
        needed = (ready[each] for each in node.all_input_nodes)
        ready[node] = position if stays else max(needed, default=0)
    return ready


def _needed(new: Node, position: int, at: Mapping[Node, int], moved: set[Node]) -> Iterator[Node]:
    """What `new` needs of the nodes behind `position`, itself included, that were not `moved` before."""
    pending = [new]
    while pending:
        node = pending.pop()
        if at[node] > position and node not in moved:
            moved.add(node)
            yield node
            pending += node.all_input_nodes
