"""Which nodes read which, through views and through nodes that each reader recomputes."""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Iterator
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from aotdist.kernels.reading import KernelReader
from aotdist.kernels.rule import Point, Pointwise, View, val_of
from aotdist.kernels.rules import is_reducing, obstacle, rule_of
from aotdist.kernels.space import Group, Place
from aotdist.torch_seam.symbols import SYMBOLIC, estimate, hint

Reads: TypeAlias = list[tuple[Node, Point]]


class Uses:
    """Classifies the nodes of a graph, and tells which read which.

    Args:
        graph: functional; nodes carry `val`.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.reasons: dict[Node, str] = {}
        """Why operators are left to the library."""
        self.views = set[Node]()
        """Nodes that kernels read through."""
        self.inlined = set[Node]()
        """Nodes that every kernel computes anew that reads them."""
        self.computed: dict[Node, None] = {}
        """Nodes that some kernel computes, in order."""
        self.kept = set[Node]()
        """Copies that make neighbours lie side by side for many readers: no reader computes them itself."""
        self._reads: dict[tuple[Any, ...], Reads] = {}
        self.nodes: list[Node] = list(graph.nodes)
        for node in self.nodes:
            if node.op == "call_function":
                self._classify(node)
        for node in self.inlined:
            if any(reader not in self.computed for reader in self.readers(node)):
                self.computed[node] = None  # a library reads it too
        self.computed = {node: None for node in self.nodes if node in self.computed}

    def _classify(self, node: Node) -> None:
        rule, val = rule_of(node), node.meta.get("val")
        if isinstance(val, SYMBOLIC):
            return
        if not isinstance(val, torch.Tensor):
            if not all(obstacle(user) is None for user in node.users):
                self.reasons[node] = "no rule"
            return
        reason = obstacle(node)
        if reason is not None:
            if node.target is not operator.getitem:
                self.reasons[node] = reason
        elif isinstance(rule, View):
            self.views.add(node)
        elif node.target is torch.ops.aten.clone.default and self._is_worth_its_copy(node):
            self.computed[node] = None
            self.kept.add(node)
        elif isinstance(rule, Pointwise) and rule.is_cheap and self._is_close_to_memory(node):
            self.inlined.add(node)
        else:
            self.computed[node] = None

    def _is_close_to_memory(self, node: Node) -> bool:
        """Whether a node reads at most one tensor, which is in memory whatever is fused."""
        sources = set(self._behind(node, is_kernel=True))
        return len(sources) <= 1 and not any(source in self.computed for source in sources)

    def _is_worth_its_copy(self, node: Node) -> bool:
        """Whether a copy is row-major, its operand is not, and its readers broadcast it.

        The bias of T5's attention, looked up by position and then permuted, is read by every sample: at
        strides of the number of heads, a kernel reached 8 percent of an H200's bandwidth.
        """
        own, source = val_of(node), val_of(node.all_input_nodes[0])
        if own.dim() < 2 or hint(own.shape[-1]) == 1 or hint(own.stride(-1)) != 1:
            return False
        read = max((num_elements(reader) for reader in self._users(node)), default=0)
        return hint(source.stride(-1)) > 1 and read > num_elements(node)

    def _users(self, node: Node) -> Iterator[Node]:
        """The nodes that read a tensor, through views."""
        for user in node.users:
            if isinstance(rule_of(user), View):
                yield from self._users(user)
            elif isinstance(user.meta.get("val"), torch.Tensor):
                yield user

    def is_transparent(self, node: Node) -> bool:
        """Whether readers of a node read its inputs instead."""
        is_torn = isinstance(node.meta.get("val"), (list, tuple)) and node not in self.reasons
        return node in self.views or (is_torn and node.op == "call_function")

    def sources(self, node: Node) -> Iterator[Node]:
        """The nodes that a node reads, through inlined ones if a kernel computes it."""
        yield from self._behind(node, is_kernel=node in self.computed or node in self.inlined)

    def read_by(self, group: Group) -> set[Node]:
        """What a group reads from outside of it."""
        read = (source for node in group.nodes() for source in self.sources(node))
        return {source for source in read if source not in group}

    def _behind(self, node: Node, *, is_kernel: bool) -> Iterator[Node]:
        for source in node.all_input_nodes:
            if is_kernel and isinstance(source.meta.get("val"), SYMBOLIC):
                continue  # a kernel is given the symbols that it needs
            if self.is_transparent(source) or (is_kernel and source in self.inlined):
                yield from self._behind(source, is_kernel=is_kernel)
            else:
                yield source

    def readers(self, node: Node) -> Iterator[Node]:
        """The nodes that read a node."""
        for user in node.users:
            if self.is_transparent(user):
                yield from self.readers(user)
            elif user in self.inlined:
                yield from (reader for reader in self.readers(user) if reader in self.computed)
                if user in self.computed:
                    yield user
            else:
                yield user

    def is_read_outside(self, node: Node, members: Container[Node]) -> bool:
        """Whether others than `members` read a node."""
        return any(reader not in members for reader in self.readers(node))

    def reads(self, node: Node, place: Place, group: Group) -> Reads:
        """What a node of a group that is computed at `place` reads there, and where."""
        folded = group.space.x if node in group.folds else ()
        key = (node, place, folded, group.space.r, group.absorbed)
        if key not in self._reads:
            seen_through = self.inlined | group.absorbed
            reader = KernelReader(
                self.views, {node, *seen_through}, group.space, folds=group.folds, keeps_casts=False
            )
            reader.read(node, Point(place))
            self._reads[key] = [
                (read, at) for read, at in reader.touched if read is not node and read not in seen_through
            ]
        return self._reads[key]

    def agrees(self, group: Group) -> bool:
        """Whether each node is read where it is computed, and reduced values at every place."""
        reduced = set[Node]()
        for node in sorted(group.places):
            all_reads = self.reads(node, group.places[node], group)
            reads = [(read, at) for read, at in all_reads if read in group.places]
            if is_reducing(node) or any(read in reduced for read, _ in reads):
                reduced.add(node)
            for read, at in reads:
                is_elsewhere = read in group.folds or at.indices != group.places[read]
                if is_elsewhere or (at.guard is not None and read in reduced):
                    return False
        return True


def num_bytes(node: Node) -> int:
    """Bytes of a node's result; of one that is no tensor, none."""
    val = val_of(node)
    return num_elements(node) * val.element_size() if isinstance(val, torch.Tensor) else 0


def num_elements(node: Node) -> int:
    """Elements of a tensor that a node makes, in the call that is traced."""
    return math.prod(estimate(size) for size in val_of(node).shape)
