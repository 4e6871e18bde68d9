"""Where nodes come from: after a rewrite that did not keep track of it, and for compilers of the user's."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch.fx import GraphModule, Node

from aotdist.program import Graph

_INHERITED = ("source", "module", "seq_nr")
_LINE = re.compile(r"(.+):(\d+)   (.*)")


def restore_provenance(graph: Graph) -> None:
    """Give nodes without a `phase` the phase, source line, module and `seq_nr` of their neighbours, in place.

    A new node belongs to the backward if anything that it is computed from does. It takes the rest from
    the nearest node of its phase that it reads, else from the first that reads it.
    """
    tangents = {node for slot, node in graph.named_placeholders().items() if slot.role == "tangent"}
    orphans = [
        node for node in graph.gm.graph.nodes if node.op == "call_function" and "phase" not in node.meta
    ]
    for node in orphans:  # in order of the graph, so that what a node reads is settled before it
        backward = any(
            read in tangents or read.meta.get("phase") == "backward" for read in node.all_input_nodes
        )
        node.meta["phase"] = "backward" if backward else "forward"
        _inherit(node, reversed(node.all_input_nodes))
    for node in reversed(orphans):
        _inherit(node, node.users)


def _inherit(node: Node, neighbours: Iterable[Node]) -> None:
    for neighbour in neighbours:
        if neighbour.meta.get("phase") == node.meta["phase"]:
            for key in _INHERITED:
                if key in neighbour.meta:
                    node.meta.setdefault(key, neighbour.meta[key])


def write_stack_traces(gm: GraphModule) -> None:
    """Give nodes with a `source` the `stack_trace` that PyTorch's tools read: one frame, the user's line."""
    for node in gm.graph.nodes:
        if found := _LINE.fullmatch(node.meta.get("source") or ""):
            file, number, code = found.groups()
            where = node.meta.get("module") or "<function>"
            node.meta["stack_trace"] = f'  File "{file}", line {number}, in {where}\n    {code}\n'
