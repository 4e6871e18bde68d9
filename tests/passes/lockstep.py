"""Runs a graph per imaginary rank, all in one process: a rank that starts a collective waits for its peers.

Sums are taken in the order of the ranks, element by element, whatever the layout of the buffer, so
merged and separate collectives give the same bits. Ranks whose next collectives don't fit together
are reported, as real ranks would hang.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from aotdist.passes.collectives import arguments
from aotdist.program import Graph

C10D = torch.ops._c10d_functional
Tensors = list[torch.Tensor]
Rank = Generator[tuple[Node, torch.Tensor], torch.Tensor, list[Any]]
Groups = Mapping[str, Sequence[Sequence[int]]]


def run_ranks(
    graphs: Sequence[Graph], args: Sequence[Sequence[torch.Tensor]], groups: Groups
) -> list[list[Any]]:
    """Results of each rank's graph.

    Args:
        graphs: one a rank.
        args: for each rank, its graph's arguments.
        groups: by name, the sets of ranks that communicate with each other.
    """
    ranks = [_run(graph, own) for graph, own in zip(graphs, args, strict=True)]
    results: dict[int, list[Any]] = {}
    pending: dict[int, tuple[Node, torch.Tensor]] = {}
    for rank in range(len(ranks)):
        _advance(ranks, rank, None, pending, results)
    while pending:
        peers = _meeting(pending, groups)
        nodes, inputs = zip(*(pending.pop(rank) for rank in peers), strict=True)
        for rank, out in zip(peers, _COLLECTIVES[nodes[0].target](nodes[0], list(inputs)), strict=True):
            _advance(ranks, rank, out, pending, results)
    return [results[rank] for rank in range(len(ranks))]


def _run(graph: Graph, args: Sequence[torch.Tensor]) -> Rank:
    env: dict[Node, Any] = dict(zip(graph.placeholders(), args, strict=True))
    for node in graph.gm.graph.nodes:
        if node.op != "call_function":
            continue
        given, named = map_arg(node.args, env.__getitem__), map_arg(node.kwargs, env.__getitem__)
        if node.target in _COLLECTIVES:
            env[node] = yield node, given[0]
        elif node.target is C10D.wait_tensor.default:
            env[node] = given[0]
        else:
            env[node] = node.target(*given, **named)
    return [None if n is None else env[n] for n in graph.results()]


def _advance(
    ranks: Sequence[Rank],
    rank: int,
    received: torch.Tensor | None,
    pending: dict[int, tuple[Node, torch.Tensor]],
    results: dict[int, list[Any]],
) -> None:
    try:
        pending[rank] = ranks[rank].send(received)  # type: ignore[arg-type]  # None starts a generator
    except StopIteration as done:
        results[rank] = done.value


def _meeting(pending: Mapping[int, tuple[Node, torch.Tensor]], groups: Groups) -> Sequence[int]:
    """Ranks of a group that have all arrived at the same collective."""
    for node, _ in pending.values():
        for peers in groups[arguments(node)["group_name"]]:
            if all(rank in pending and _fits(pending[rank], node) for rank in peers):
                shapes = {pending[rank][1].shape for rank in peers}
                assert len(shapes) == 1, f"{node.name}: ranks bring {shapes}"
                return peers
    raise AssertionError(f"ranks would hang: { ({r: n.name for r, (n, _) in pending.items()}) }")


def _fits(arrived: tuple[Node, torch.Tensor], node: Node) -> bool:
    return arrived[0].target is node.target and arrived[0].args[1:] == node.args[1:]


def _reduced(node: Node, inputs: Tensors) -> torch.Tensor:
    total = inputs[0]
    for one in inputs[1:]:
        total = total + one
    return total / len(inputs) if arguments(node)["reduce_op"] == "avg" else total


def _gather(node: Node, inputs: Tensors) -> Tensors:
    return [torch.cat(inputs) for _ in inputs]


def _scatter(node: Node, inputs: Tensors) -> Tensors:
    return [part.clone() for part in _reduced(node, inputs).chunk(len(inputs))]


def _reduce(node: Node, inputs: Tensors) -> Tensors:
    return [_reduced(node, inputs).clone() for _ in inputs]


_COLLECTIVES: dict[Any, Callable[[Node, Tensors], Tensors]] = {
    C10D.all_gather_into_tensor.default: _gather,
    C10D.reduce_scatter_tensor.default: _scatter,
    C10D.all_reduce.default: _reduce,
}
