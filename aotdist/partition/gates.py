"""Gates: where the backward stops on its way, so that the caller's hooks see the gradient of a waypoint.

The trace cuts the joint graph at every waypoint (`aotdist.trace.observed_grads`). Usually nobody watches: the
cuts are closed again (`linked`), and the backward is one graph. When somebody does, it runs part by part. A
gate is an autograd node behind the program's own, from which the results at its level come. It computes those
pieces of the waypoints' gradients that follow from these results and from those of higher levels; autograd
sums them in the order of the trace, which is eager's, lets the caller watch, and goes on to the next gate.
What parts have in common is computed in each, with the same bits, so nothing has to be handed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from aotdist.facts import Facts
from aotdist.partition.builder import GraphBuilder, returning
from aotdist.partition.halves import find_halves
from aotdist.partition.split import backward_from
from aotdist.partition.traits import is_late, is_random
from aotdist.program import Graph, NodeOutIdx, Split


@dataclass(frozen=True, slots=True)
class Gate:
    """An autograd node that some results come from.

    Args:
        level: how many waypoints lie before it.
        outs: the results that come from the node.
        pieces: what it sends back: each a waypoint, by position, and the position of the piece there.
    """

    level: int
    outs: tuple[NodeOutIdx, ...]
    pieces: tuple[tuple[int, int], ...]


def linked(cut: Graph) -> Graph:
    """The joint graph without cuts: what arrives at a waypoint goes on from there."""
    arrives = {slot: node for slot, node in cut.named_results().items() if slot.role == "total"}
    goes_on = {slot: node for slot, node in cut.named_placeholders().items() if slot.role == "total"}
    if not goes_on:
        return cut
    waiting: dict[Node | None, list[Node]] = {}
    for slot, node in goes_on.items():
        waiting.setdefault(arrives[slot], []).append(node)
    builder = GraphBuilder(cut.gm)
    late: dict[Node, list[Node]] = {}  # nodes that wait for a gradient recorded after them, by that gradient

    def go_on(node: Node) -> list[Node]:
        """Close the cuts at `node`; returns the nodes that waited for it."""
        waiters = late.pop(node, [])
        for argument in waiting.pop(node, ()):
            builder.env[argument] = builder.env[node]
            waiters += go_on(argument)
        return waiters

    for slot, node in cut.named_placeholders().items():
        if slot not in goes_on:
            builder.placeholder(node)
            go_on(node)
    for node in cut.gm.graph.nodes:
        stack = [] if node.op in ("placeholder", "output") else [node]
        while stack:
            now = stack.pop()
            lacking = next((source for source in now.all_input_nodes if source not in builder.env), None)
            if lacking is None:
                builder.copy(now)
                stack += reversed(go_on(now))
            else:
                late.setdefault(lacking, []).append(now)
    kept = {slot: node for slot, node in cut.named_results().items() if slot.role not in ("total", "piece")}
    results = [None if node is None else builder.env[node] for node in kept.values()]
    return builder.finish(results, [slot for slot in cut.ins if slot not in goes_on], list(kept))


def plan_gates(cut: Graph, facts: Facts) -> tuple[Gate, ...]:
    """The gates of a joint graph that is cut at its waypoints, from the lowest level up: one for each level.

    A piece is sent by the gate at which all that it depends on has arrived, and never before one that eager
    adds earlier. There are no gates if the backward draws random numbers: its parts cannot run separately.
    """
    backward = facts.backward
    levels = _levels(cut, facts) if backward.waypoints else {}
    if any(is_random(node) and is_late(node) for node in cut.gm.graph.nodes):
        return ()
    pieces: dict[int, list[tuple[int, int]]] = {}
    results = cut.named_results()
    for position, waypoint in enumerate(backward.waypoints):
        latest = len(backward.waypoints)
        for k in range(len(waypoint.pieces)):
            levels_of_parts = [
                levels.get(node) for slot in waypoint.piece_slots(k) if (node := results[slot])
            ]
            reached = [level for level in levels_of_parts if level is not None]
            if reached:  # else it stems from a view, and comes back through it
                latest = min(latest, *reached)
                pieces.setdefault(latest, []).append((position, k))
    if not pieces or any(level <= position for level, sent in pieces.items() for position, _ in sent):
        return ()
    at_level: dict[int, list[NodeOutIdx]] = {}
    for idx, level in backward.levels.enumerate():
        if level:
            at_level.setdefault(level, []).append(idx)
    return tuple(Gate(k, tuple(outs), tuple(pieces.get(k, ()))) for k, outs in sorted(at_level.items()))


def _levels(cut: Graph, facts: Facts) -> Mapping[Node, int | None]:
    """The level at which all that a backward node depends on has arrived; None where nothing arrives."""
    backward = facts.backward
    arrives = {waypoint.path: waypoint.value for waypoint in backward.waypoints}
    goes_in = {out.slot.path: idx for idx, out in facts.node_outs.enumerate()}
    levels: dict[Node, int | None] = {}
    for slot, node in cut.named_placeholders().items():
        if slot.role == "tangent":
            value = None if arrives.get(slot.path) is not None else goes_in[slot.path]
            levels[node] = None if value is None else backward.levels[value]
        elif slot.role == "total":
            value = arrives[slot.path]
            levels[node] = None if value is None else backward.levels[value]
    for node in cut.gm.graph.nodes:
        late = [levels[source] for source in node.all_input_nodes if source in levels]
        if node.op != "output" and late:
            levels[node] = min((level for level in late if level is not None), default=None)
    return levels


def parts_of(cut: Graph, split: Split) -> Graph:
    """The backward of a graph that is cut at its waypoints, from what the forward of `split` saves."""
    kept = {slot: node for slot, node in cut.named_results().items() if slot.role != "total"}
    halves = find_halves(returning(cut, list(kept)))
    named = {node.name: node for node in halves.order}
    primals = halves.joint.named_placeholders()
    saved = [
        primals[split.saved_primals[slot]] if slot in split.saved_primals else named.get(slot.path[1:])
        for slot in split.saved
    ]
    return backward_from(halves, [node for node in saved if node is not None])
