"""The order in which the steps of a graph run: kernels, and nodes that are in none."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from torch.fx import Node

from aotdist.kernels.emitted import EmittedKernel
from aotdist.program import Graph

Step: TypeAlias = EmittedKernel | Node


class Schedule:
    """The steps that are needed, in the order of the nodes; a kernel is at the place of its last node."""

    def __init__(self, graph: Graph, kernels: Sequence[EmittedKernel], fixed: Sequence[Node]) -> None:
        nodes = list(graph.gm.graph.nodes)
        self.by_name: dict[str, Node] = {node.name: node for node in nodes}
        self._position = {node: at for at, node in enumerate(nodes)}
        self._step_of: dict[Node, Step] = {node: node for node in nodes}
        self._step_of.update({self.by_name[name]: one for one in kernels for name in one.printed.outputs})
        self._after_fixed = dict(zip(fixed[1:], fixed, strict=False))
        arguments = [node for node in nodes if node.op in ("placeholder", "get_attr")]
        self._live = self._needed([*arguments, *fixed, graph.gm.graph.output_node()])

    def in_order(self) -> Iterator[Step]:
        """Every step that is needed, after those that it needs."""
        waits = {step: set(self.needs(step)) for step in self._live}
        users: dict[Step, list[Step]] = {}
        for step, needed in waits.items():
            for other in needed:
                users.setdefault(other, []).append(step)
        ready = [(self._place(step), step) for step, needed in waits.items() if not needed]
        heapq.heapify(ready)
        left = len(self._live)
        while ready:
            _, step = heapq.heappop(ready)
            yield step
            left -= 1
            for user in users.get(step, ()):
                waits[user].discard(step)
                if not waits[user]:
                    heapq.heappush(ready, (self._place(user), user))
        assert left == 0, f"{left} steps wait for each other"

    def _place(self, step: Step) -> int:
        nodes = (step,) if isinstance(step, Node) else step.nodes
        return max(self._position[node] for node in nodes)

    def needs(self, step: Step) -> list[Step]:
        """The steps that have to run before a step."""
        needed = self.reads(step)
        if isinstance(step, Node) and step in self._after_fixed:
            needed = [*needed, self._after_fixed[step]]
        return [self._step_of[node] for node in needed]

    def reads(self, step: Step) -> list[Node]:
        """The tensors that a step reads."""
        if isinstance(step, EmittedKernel):
            return [self.by_name[name] for name in step.printed.inputs]
        return step.all_input_nodes

    def _needed(self, roots: Iterable[Node]) -> dict[Step, None]:
        found: dict[Step, None] = {}
        stack = [self._step_of[root] for root in reversed(list(roots))]
        while stack:
            step = stack.pop()
            if step not in found:
                found[step] = None
                stack.extend(self.needs(step))
        return found
