"""By which numbers a traced step chose its way, and whether a call would choose the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from aotdist.joint.scalars import Scalars


@dataclass(frozen=True, slots=True)
class Questions:
    """What one trace asked.

    Args:
        ask: the answers, given the tensors of a call whose numbers are there before it.
        answers: those of the trace.
    """

    ask: Callable[..., Sequence[Any]]
    answers: tuple[bool, ...]

    @classmethod
    def of(cls, scalars: Scalars) -> Questions | None:
        """The questions of a trace; None if it asked nothing."""
        if not scalars.asked:
            return None
        graph, copies = Graph(), dict[Node, Node]()
        for at, node in enumerate(scalars.values):
            copies[node] = graph.placeholder(f"given_{at}")
        asked = [node for node, _ in scalars.asked]
        for node in _in_order(asked, copies):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in asked))
        return cls(GraphModule(scalars.root, graph), tuple(holds for _, holds in scalars.asked))

    def hold(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether the answers are the same now."""
        return tuple(map(bool, self.ask(*given))) == self.answers


def _in_order(asked: Sequence[Node], known: dict[Node, Node]) -> list[Node]:
    """The nodes that lead from what is known to what is asked, in the order of their graph."""
    found, waiting = set[Node](), list(asked)
    while waiting:
        node = waiting.pop()
        if node not in found and node not in known:
            found.add(node)
            waiting += node.all_input_nodes
    return sorted(found)
