"""Puts `unbind` back together where the trace broke it up.

Before it reaches a graph, PyTorch turns `unbind` (and the backward of `stack`) into one `select` an index.
Eager makes those in C++; as operators of a graph each costs 1.5 us, 150 us for a stack of 100.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch.fx import Node

from aotdist.program import Graph

_SELECT = torch.ops.aten.select.int
_UNBIND = torch.ops.aten.unbind.int
_FEWEST = 4  # below, one more operator and its getitems cost as much as they save


def rejoin_selects(graph: Graph) -> Graph:
    """`graph` with every complete set of selects along one dim as one `unbind`; itself when there is none.

    The results are the same views of the same memory.
    """
    if not _complete_sets(graph):
        return graph
    rejoined = graph.copied()
    for (source, dim), selects in _complete_sets(rejoined).items():
        _replace(rejoined, source, dim, selects)
    return rejoined


def _complete_sets(graph: Graph) -> dict[tuple[Node, int], list[Node]]:
    """Selects by tensor and dim, where every index is taken."""
    found: dict[tuple[Node, int], list[Node]] = defaultdict(list)
    for node in graph.gm.graph.find_nodes(op="call_function", target=_SELECT):
        source, dim, index = node.args
        if isinstance(index, int):
            found[source, dim].append(node)
    return {key: selects for key, selects in found.items() if _is_complete(*key, selects)}


def _is_complete(source: Node, dim: int, selects: list[Node]) -> bool:
    size = source.meta["val"].size(dim)
    if isinstance(size, torch.SymInt) or size < _FEWEST:
        return False
    return {_index(node, size) for node in selects} == set(range(size))


def _index(select: Node, size: int) -> int:
    index = select.args[2]
    assert isinstance(index, int)
    return index % size


def _replace(graph: Graph, source: Node, dim: int, selects: list[Node]) -> None:
    """One `unbind` where the first select stood, so that its source lives no longer than before."""
    size = source.meta["val"].size(dim)
    first = next(node for node in graph.gm.graph.nodes if node in set(selects))
    values = {_index(node, size): node.meta["val"] for node in selects}
    with graph.gm.graph.inserting_before(first):
        unbind = graph.gm.graph.call_function(_UNBIND, (source, dim))
        unbind.meta = {**first.meta, "val": [values[index] for index in range(size)]}
        parts = [graph.gm.graph.call_function(operator.getitem, (unbind, index)) for index in range(size)]
    for index, part in enumerate(parts):
        part.meta = {**first.meta, "val": values[index]}
    for node in selects:
        node.replace_all_uses_with(parts[_index(node, size)])
        graph.gm.graph.erase_node(node)
