"""Launches of a graph, kernels as source with their blocks, and the order in which its steps run."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.fx import Node

from aotdist.kernels.gpus import USUAL, Gpu
from aotdist.kernels.ir import Kernel
from aotdist.kernels.launching import Config, num_blocks_of
from aotdist.kernels.polynomial import Whole
from aotdist.kernels.printing import Printed
from aotdist.program import Graph


@dataclass(frozen=True, slots=True, eq=False)
class EmittedKernel:
    """One launch.

    Args:
        members: the kernel, or several that differ in nothing but their tensors and numbers.
        printed: its source.
        ways: how it may be cut into blocks, by estimated cost, cheapest first.
        nodes: the nodes that it computes, in order.
        num_bytes: what it reads and writes.
        looped: its source with loops, if it depends on the call whether one block holds what it reduces.
        gpu: which it is for.
    """

    members: tuple[Kernel, ...]
    printed: Printed
    ways: tuple[Config, ...]
    nodes: tuple[Node, ...]
    num_bytes: int
    looped: Printed | None = None
    gpu: Gpu = USUAL

    @property
    def forms(self) -> list[Printed]:
        """All its sources, of which a call runs one."""
        return [self.printed] if self.looped is None else [self.printed, self.looped]

    @property
    def is_sized(self) -> bool:
        """Whether it takes sizes, which differ from call to call."""
        return any(form.sizes for form in self.forms)

    @property
    def kernel(self) -> Kernel:
        """The first of its members; the others differ in tensors and numbers only."""
        return self.members[0]

    @property
    def config(self) -> Config:
        """How it is cut into blocks if nothing was measured."""
        return self.ways[0]

    @property
    def num_blocks(self) -> int:
        """How many blocks run side by side."""
        return self.num_blocks_in(self.config)

    def num_blocks_in(self, way: Config) -> int:
        """How many blocks run if it is cut in a given way."""
        return sum(num_blocks_of(member, way) for member in self.members)

    @property
    def num_results(self) -> Whole:
        """Places along `x`, of all members."""
        return sum(member.num_results for member in self.members)


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
