"""Decides which nodes share a kernel.

Each node that the emitter has a rule for starts as a group of its own. Groups of which one reads the other,
or that read the same tensor, are merged, those that save most bytes first, as long as

- all their nodes can be computed over one iteration space, each element once (`_placed`), where sums of the
  rows of a part may be made on the way (`aotdist.kernels.columns`);
- no node outside has to run between them;
- the kernel stays small enough for its values to stay in registers.

A group of nodes that only one other group reads may also be computed there wherever it is read (`_absorbed`).

Views belong to no group: whoever reads one reads what it views. Neither do cheap nodes over memory (casts,
fills): whoever reads one computes it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from aotdist.kernels.columns import rows_folded
from aotdist.kernels.index import Axis, Index, Var, offset, unflat
from aotdist.kernels.launching import MAX_PERSISTENT
from aotdist.kernels.polynomial import at_most
from aotdist.kernels.recomputing import recompute, stored_nodes
from aotdist.kernels.reductions import reduced_dims
from aotdist.kernels.rule import sizes_of, strides_of
from aotdist.kernels.rules import is_reducing
from aotdist.kernels.space import Group, Place, Space, space_of
from aotdist.kernels.units import Unit, Units
from aotdist.kernels.uses import Uses, num_bytes

MAX_NODES = 64
"""How many nodes a kernel computes."""
MAX_TENSORS = 24
"""How many tensors a kernel reads and writes: its loads and stores hold registers at the same time."""
MAX_ABSORBED = 16
"""How many nodes are computed wherever they are read."""
MAX_READINGS = 3
"""At how many different places these may be read."""
MAX_BYTES_READ = 64
"""How many bytes each of two groups may read for a byte that both read, to be worth one kernel; of others
`bundling.py` makes one launch all the same."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of each node of a graph.

    Args:
        groups: kernels, as groups of nodes.
        views: nodes that kernels read through.
        inlined: nodes that every kernel computes anew that reads them.
        stored: nodes of groups that others read.
        reasons: why the others are left to the library.
    """

    groups: Sequence[Group]
    views: frozenset[Node]
    inlined: frozenset[Node]
    stored: frozenset[Node]
    reasons: Mapping[Node, str]


def plan(graph: torch.fx.Graph, fixed: Sequence[Node]) -> Plan:
    """Group the nodes of a graph.

    Args:
        graph: functional; nodes carry `val`.
        fixed: nodes that run in this order (random numbers, collectives), and no later than they must.
    """
    uses = Uses(graph)
    units = Units(uses, fixed)
    _merge_all(units)
    groups = [unit.group for unit in units.in_order() if unit.group is not None]
    groups = recompute(uses, groups)
    stored = stored_nodes(uses, groups)
    groups = [group for group in groups if not stored.isdisjoint(group.places)]
    return Plan(groups, frozenset(uses.views), frozenset(uses.inlined), frozenset(stored), uses.reasons)


def _merge_all(units: Units) -> None:
    """Merge groups while there are two that may be, best first."""
    serial = itertools.count()
    heap: list[tuple[int, int, Unit, Unit]] = []

    def offer(unit: Unit, others: Iterable[Unit]) -> None:
        for other in others:
            if other is not unit and other.group is not None and unit.group is not None:
                heapq.heappush(heap, (-_bytes_saved(units, unit, other), next(serial), unit, other))

    for unit in units.in_order():
        offer(unit, sorted(units.producers(unit), key=units.last))
    for readers in _readers_of_memory(units).values():
        for one, other in itertools.pairwise(readers):
            offer(one, (other,))
    while heap:
        _, _, one, other = heapq.heappop(heap)
        if not (units.is_current(one) and units.is_current(other)):
            continue
        group = _merged(units, one, other)
        if group is not None:
            merged = units.merge(one, other, group)
            neighbours = units.producers(merged) | units.consumers(merged)
            siblings = {sibling for source in units.producers(merged) for sibling in units.consumers(source)}
            offer(merged, sorted(neighbours | siblings, key=units.last))


def _readers_of_memory(units: Units) -> dict[Node, list[Unit]]:
    """The groups that read each tensor that no group computes."""
    readers: dict[Node, list[Unit]] = {}
    for unit in units.in_order():
        if unit.group is None:
            continue
        for source in units.sources(unit):
            if source not in units.uses.computed:
                readers.setdefault(source, []).append(unit)
    return readers


def _bytes_saved(units: Units, one: Unit, other: Unit) -> int:
    """Bytes that need not be read again, and those that need not be written."""
    first, second = units.sources(one), units.sources(other)
    passed = [source for source in first if source in other.nodes]
    passed += [source for source in second if source in one.nodes]
    members = {*one.nodes, *other.nodes}
    unwritten = [node for node in passed if not units.uses.is_read_outside(node, members)]
    shared = [source for source in first if source in second]
    return sum(num_bytes(node) for node in (*passed, *unwritten, *shared))


def _is_worth_it(units: Units, one: Unit, other: Unit) -> bool:
    """Whether one group reads results of the other, or both read many of the same bytes."""
    if other in units.producers(one) or one in units.producers(other):
        return True
    read = min(sum(num_bytes(source) for source in units.sources(unit)) for unit in (one, other))
    return _bytes_saved(units, one, other) * MAX_BYTES_READ >= read


def _merged(units: Units, one: Unit, other: Unit) -> Group | None:
    """The merged group, over the iteration space of the one that reduces, else of the later one."""
    if len(one.nodes) + len(other.nodes) > MAX_NODES or not _is_worth_it(units, one, other):
        return None
    if not units.may_run_as_one(one, other):
        return None
    passed = {*units.sources(one), *units.sources(other)} & {*one.nodes, *other.nodes}
    if not units.uses.kept.isdisjoint(passed):
        return None
    hosts = sorted((one, other), key=lambda unit: (_reduces(unit), units.last(unit)), reverse=True)
    for merge in (_placed, _absorbed):
        for host, guest in (hosts, reversed(hosts)):
            assert host.group is not None and guest.group is not None, "only groups are merged"
            group = merge(units.uses, host.group, guest.group)
            if group is not None and _num_tensors(units.uses, group) <= MAX_TENSORS:
                return group
    return None


def _reduces(unit: Unit) -> bool:
    return unit.group is not None and bool(unit.group.space.r)


def _num_tensors(uses: Uses, group: Group) -> int:
    return len(uses.read_by(group)) + sum(uses.is_read_outside(node, group) for node in group.places)


def _placed(uses: Uses, host: Group, guest: Group) -> Group | None:
    """The nodes of a guest, placed in the space of a host; None if some don't fit, or nothing is shared."""
    folds = _folds(host, guest)
    if not _may_fit(host.space, guest.space, folds):
        return None
    unplaced = dict(guest.places)
    group = Group(host.space, dict(host.places), host.absorbed | guest.absorbed, host.folds | folds)
    while unplaced:
        node = _next(uses, group, unplaced)
        place = _place_of(uses, group, node)
        if place is None:
            return None
        group = replace(group, places={**group.places, node: place})
        del unplaced[node]
    if not (uses.agrees(group) and _shares(uses, host, guest, group)):
        return None
    read, written = _fast_axes(uses, group), _written_axes(uses, group) if group.space.r else set[Axis]()
    if group.folds:
        is_held = at_most(host.space.num_reduced, MAX_PERSISTENT)
        return group if is_held and read | written == {"r"} else None
    is_mixed = (guest.space.r and len(read) > 1) or (written and len(read | written) > 1)
    return None if is_mixed else group


def _folds(host: Group, guest: Group) -> frozenset[Node]:
    """The nodes of a guest that add up rows of the space of a host."""
    if guest.folds or not host.space.r or not guest.space.r or host.space.is_like(guest.space):
        return guest.folds
    return frozenset(node for node in guest.places if rows_folded(node))


def _fast_axes(uses: Uses, group: Group) -> set[Axis]:
    """The axes along which a group's reads that vary along both axes are contiguous.

    Sums of rows and of columns of one square tensor would fit into one space, and half of them would be slow.
    """
    found = set[Axis]()
    for node, place in group.places.items():
        for read, at in uses.reads(node, place, group):
            if read in group.places:
                continue
            found |= _axes(offset(at.indices, strides_of(read)))
    return found


def _written_axes(uses: Uses, group: Group) -> set[Axis]:
    """The same for what a group writes.

    A kernel that reduces has no tiles, so one that writes a transposed copy would write element by element.
    """
    stored = (node for node in group.places if uses.is_read_outside(node, group))
    return set[Axis]().union(*(_axes(offset(group.places[node], strides_of(node))) for node in stored))


def _axes(index: Index) -> set[Axis]:
    """The axes along which an index that varies along both has stride 1."""
    if len({var.axis for var in index.variables()}) < 2:
        return set()
    return {atom.axis for atom, scale in index.terms if isinstance(atom, Var) and scale == 1}


def _may_fit(host: Space, guest: Space, folds: Container[Node]) -> bool:
    if guest.r and host.r:
        return host.num_elements == guest.num_elements if folds else host.is_like(guest)
    if guest.r:
        return False
    return guest.num_elements in (host.num_results, host.num_elements)


def _absorbed(uses: Uses, host: Group, guest: Group) -> Group | None:
    """The host with the guest recomputed at each read; None if others read the guest, or it costs much."""
    group = replace(host, absorbed=host.absorbed | frozenset(guest.nodes()))
    if guest.space.r or any(uses.is_read_outside(node, group) for node in guest.places):
        return None
    readings = {
        (read, at.indices)
        for node, place in host.places.items()
        for read, at in uses.reads(node, place, host)
        if read in guest.places
    }
    is_worth_it = len(readings) <= MAX_READINGS and len(guest.places) <= MAX_ABSORBED
    return group if is_worth_it and uses.agrees(group) else None


def _next(uses: Uses, group: Group, unplaced: Mapping[Node, Place]) -> Node:
    """The next node to place: an input of a placed node, else a user of one, else the first."""
    for node in reversed(list(unplaced)):
        if any(reader in group for reader in uses.readers(node)):
            return node
    for node in unplaced:
        if any(source in group for source in uses.sources(node)):
            return node
    return next(iter(unplaced))


def _place_of(uses: Uses, group: Group, node: Node) -> Place | None:
    """Where a node is computed: where placed users read it, else as its placed inputs, else row-major."""
    space, places = group.space, group.places
    if node in group.folds:
        return _place_of_fold(space, node)
    reads = (
        read
        for user in places
        if _may_read(uses, user, node, group)
        for read in uses.reads(user, places[user], group)
    )
    wanted = {at.indices for read, at in reads if read is node}
    if len(wanted) > 1:
        return None
    place = wanted.pop() if wanted else _permuted(uses, group, node)
    if place is None:
        place = space.row_major(sizes_of(node), reduces=is_reducing(node))
    return place if place is not None and space.fits(place, sizes_of(node)) else None


def _place_of_fold(space: Space, node: Node) -> Place | None:
    """Which sum of the rows of a part a place belongs to."""
    (parts, rows, *columns), _ = reduced_dims(node)
    if parts * rows != space.num_results:
        return None
    return space.row() // rows, *unflat(space.column(), columns)


def _may_read(uses: Uses, user: Node, node: Node, group: Group) -> bool:
    """Whether a node reads another, maybe through what is absorbed."""
    return any(source is node or source in group.absorbed for source in uses.sources(user))


def _permuted(uses: Uses, group: Group, node: Node) -> Place | None:
    """Where a node that reads a placed one with permuted dimensions reads it where it is computed."""
    if is_reducing(node):
        return None
    own = space_of(node)
    for read, at in uses.reads(node, own.results, Group(own, {}, group.absorbed)):
        if read in group.places and len(at.indices) == len(own.x) and set(at.indices) == set(own.results):
            return tuple(group.places[read][at.indices.index(index)] for index in own.results)
    return None


def _shares(uses: Uses, host: Group, guest: Group, both: Group) -> bool:
    """Whether one group reads the other's result, or both read the same element at the same place."""

    def reads(group: Group) -> set[tuple[Node, Place]]:
        elements = (read for node in group.places for read in uses.reads(node, both.places[node], both))
        return {(read, at.indices) for read, at in elements}

    by_host, by_guest = reads(host), reads(guest)
    crosses = any(read in guest.places for read, _ in by_host) or any(r in host.places for r, _ in by_guest)
    return crosses or bool(by_host & by_guest)
