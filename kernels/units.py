"""The units of a graph (groups, and single nodes outside of groups) and their order, during fusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from aotdist.kernels.space import Group, group_of
from aotdist.kernels.uses import Uses


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A group, or a node that is part of none."""

    nodes: tuple[Node, ...]
    group: Group | None


class Units:
    """The units of a graph, and their order."""

    def __init__(self, uses: Uses, fixed: Sequence[Node]) -> None:
        self.uses = uses
        self._position = {node: at for at, node in enumerate(uses.nodes)}
        self._fixed = dict(zip(fixed[1:], fixed, strict=False))
        self._is_fixed = set(fixed)
        self._unit_of: dict[Node, Unit] = {}
        for node in uses.nodes:
            if node in uses.computed:
                self._unit_of[node] = Unit((node,), group_of(node))
            elif node not in uses.inlined and not uses.is_transparent(node):
                self._unit_of[node] = Unit((node,), None)
        self._before: dict[Unit, set[Unit]] = {}
        self._after: dict[Unit, set[Unit]] = {}
        for unit in self._unit_of.values():
            self._link(unit)

    def in_order(self) -> list[Unit]:
        """Every unit, by its last node."""
        return sorted(set(self._unit_of.values()), key=self.last)

    def last(self, unit: Unit) -> int:
        """The position of the last node of a unit."""
        return max(self._position[node] for node in unit.nodes)

    def is_current(self, unit: Unit) -> bool:
        """Whether a unit has not become part of another."""
        return self._unit_of[unit.nodes[0]] is unit

    def sources(self, unit: Unit) -> dict[Node, None]:
        """What a unit reads from outside of it."""
        inside = set(unit.nodes)
        read = (source for node in unit.nodes for source in self.uses.sources(node))
        return {source: None for source in read if source not in inside}

    def producers(self, unit: Unit) -> set[Unit]:
        """The units that a unit reads from."""
        return {self._unit_of[source] for source in self.sources(unit)}

    def consumers(self, unit: Unit) -> set[Unit]:
        """The units that read from a unit."""
        return self._after[unit] - {unit}

    def _link(self, unit: Unit) -> None:
        before = self.producers(unit)
        before |= {self._unit_of[self._fixed[node]] for node in unit.nodes if node in self._fixed}
        self._before[unit] = before - {unit}
        self._after.setdefault(unit, set())
        for other in self._before[unit]:
            self._after.setdefault(other, set()).add(unit)

    def may_run_as_one(self, one: Unit, other: Unit) -> bool:
        """Whether no other unit must run between two, and merging them delays no fixed node."""
        last = max(self.last(one), self.last(other))
        users = self._after[one] | self._after[other]
        if any(
            node in self._is_fixed and self._position[node] < last for unit in users for node in unit.nodes
        ):
            return False
        return not (self._leads(one, other) or self._leads(other, one))

    def _leads(self, start: Unit, end: Unit) -> bool:
        """Whether a third unit lies on a way from one to the other."""
        seen, stack = set[Unit](), list(self._after[start] - {end})
        while stack:
            unit = stack.pop()
            if unit is end:
                return True
            if unit not in seen:
                seen.add(unit)
                stack.extend(self._after[unit])
        return False

    def merge(self, one: Unit, other: Unit, group: Group) -> Unit:
        """Make one unit of two."""
        nodes = sorted((*one.nodes, *other.nodes), key=self._position.__getitem__)
        merged = Unit(tuple(nodes), group)
        self._unit_of.update(dict.fromkeys(nodes, merged))
        parts = {one, other}
        self._before[merged] = (self._before.pop(one) | self._before.pop(other)) - parts
        self._after[merged] = (self._after.pop(one) | self._after.pop(other)) - parts
        for unit in self._before[merged]:
            self._after[unit] = (self._after[unit] - parts) | {merged}
        for unit in self._after[merged]:
            self._before[unit] = (self._before[unit] - parts) | {merged}
        return merged
