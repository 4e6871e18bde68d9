"""Lets collectives run while the graph computes: gathers start early, reductions finish late.

Collectives of one FSDP unit that follow each other form a stage. Pure reordering:

- a stage's gathers start before the first wait of the stage before it, so that they run during
  that unit's compute; the first stage's start at the top. At most two units are gathered at a time;
- a gather's wait, with its copy-out, stands right before the first node that uses a gathered value;
- a stage's reductions are waited for once the next stage's have started, the last ones at the end:
  at most one stage is in flight when another starts, which bounds the memory of their inputs.

The order depends on the graph alone, so every rank starts its collectives in the same order.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Node

from aotdist.partition.traits import is_copy_back, is_wait
from aotdist.passes.bucket import GATHER, REDUCE, SCATTER
from aotdist.passes.collectives import wait_of
from aotdist.passes.editing import hoist, sink
from aotdist.program import Graph
from aotdist.settings import Settings

_ATEN = torch.ops.aten

_COPY_OUT = frozenset(
    {
        operator.getitem,
        _ATEN.view.default,
        _ATEN.split_with_sizes_copy.default,
        _ATEN.split_with_sizes.default,
        _ATEN.slice.Tensor,
        _ATEN.narrow.default,
    }
)
"""What stands between a gather's wait and the first real use of what it gathered."""

Stage = list[Node]
"""Starts of collectives of one unit that follow each other."""


def overlap(graph: Graph, settings: Settings) -> Graph:
    """The same nodes in an order that hides communication behind compute."""
    if not any(map(_serves_unit, graph.calls(lambda node: node.target in (GATHER, SCATTER, REDUCE)))):
        return graph
    ordered = graph.copied()
    _finish_gathers_late(_stages(ordered, GATHER))
    _start_gathers_early(ordered, _stages(ordered, GATHER))
    for op in (SCATTER, REDUCE):
        _finish_reductions_late(ordered, _stages(ordered, op))
    return ordered


def _serves_unit(node: Node) -> bool:
    return node.meta.get("unit") is not None and wait_of(node) is not None


def _stages(graph: Graph, op: Any) -> list[Stage]:
    starts = filter(_serves_unit, graph.gm.graph.find_nodes(op="call_function", target=op))
    return [list(run) for _, run in itertools.groupby(starts, key=lambda n: n.meta["unit"])]


def _waits(stage: Stage) -> list[Node]:
    waits = [wait_of(start) for start in stage]
    return sorted(wait for wait in waits if wait is not None)


def _finish_gathers_late(stages: Iterable[Stage]) -> None:
    for stage in stages:
        for wait in reversed(_waits(stage)):
            _move_to_first_use(wait)


def _move_to_first_use(wait: Node) -> None:
    """Moves a wait and its copy-out right before the first node that needs them."""
    chain = {wait: None}
    users: list[Node] = []
    pending = [wait]
    while pending:
        for user in pending.pop().users:
            if user.target in _COPY_OUT and user.all_input_nodes[0] in chain:
                chain.setdefault(user)
                pending.append(user)
            else:
                users.append(user)
    if not users:
        return
    first = min(users)
    for node in sorted(chain):
        if node < first:
            first.prepend(node)


def _start_gathers_early(graph: Graph, stages: Sequence[Stage]) -> None:
    if not stages:
        return
    top = next(n for n in graph.gm.graph.nodes if n.op != "placeholder")
    barred = {n for n in graph.gm.graph.nodes if is_wait(n)}  # a start never waits for another collective
    targets = [top, *(_waits(stage)[0] for stage in stages)]
    for target, stage in zip(targets, stages, strict=False):
        for start in stage:
            if target < start:
                hoist(start, target, barred)


def _finish_reductions_late(graph: Graph, stages: Sequence[Stage]) -> None:
    if not stages:
        return
    for stage, following in itertools.pairwise(stages):
        _sink_waits(stage, following[-1])
    end = graph.gm.graph.output_node().prev
    while is_copy_back(end):
        end = end.prev
    _sink_waits(stages[-1], end)


def _sink_waits(stage: Stage, after: Node) -> None:
    waits = [wait for wait in _waits(stage) if wait < after]
    if waits:
        sink(waits, first=waits[0], after=after)
