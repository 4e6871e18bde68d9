"""Decides which values each reader recomputes, rather than one kernel storing them for the others.

The shifted logits of a loss are as large as the logits, and are read again at one place of each row. They
follow by one subtraction from logits and maxima, which lie in memory anyway. So their reader computes them,
and no kernel writes them, if that saves bytes and is little work.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from torch.fx import Node

from aotdist.kernels.index import Index, num_places
from aotdist.kernels.ir import every_part
from aotdist.kernels.polynomial import hint_of
from aotdist.kernels.reading import KernelReader
from aotdist.kernels.rule import Point, Pointwise, val_of
from aotdist.kernels.rules import rule_of
from aotdist.kernels.space import Group, space_of
from aotdist.kernels.uses import Uses, num_bytes, num_elements

MAX_CHAIN = 8
"""How many nodes a reader may recompute."""
MAX_LEAVES = 3
"""How many tensors these may be computed from."""
RARE = 8
"""If no more than one in so many elements is read, these are recomputed however much work that is."""

_WORK = frozenset({"exp", "exp2", "log", "log2", "rsqrt", "sqrt", "sin", "cos", "erf", "div"})
"""Operations of more than an instruction or two."""


def recompute(uses: Uses, groups: Sequence[Group]) -> list[Group]:
    """The groups, in which readers compute what is cheap to compute.

    Args:
        uses: who reads what.
        groups: those of a whole graph, in order.
    """
    chosen = list(groups)
    read, stored = [uses.read_by(group) for group in chosen], stored_nodes(uses, chosen)
    for at, group in enumerate(groups):
        for node in group.places:
            if node not in stored or node in uses.kept:
                continue
            readers = {k: chosen[k] for k, sources in enumerate(read) if k != at and node in sources}
            changed = _recomputing(uses, chosen[at], node, readers, stored)
            for k, reader in changed.items():
                chosen[k], read[k] = reader, uses.read_by(reader)
            stored = stored_nodes(uses, chosen) if changed else stored
    return chosen


def stored_nodes(uses: Uses, groups: Iterable[Group]) -> set[Node]:
    """Nodes that a group computes for others."""
    placed, read = set[Node](), set[Node]()
    for group in groups:
        placed.update(group.places)
        read.update(uses.read_by(group))
    for node in uses.nodes:
        if not (node in uses.computed or node in uses.inlined or uses.is_transparent(node)):
            read.update(uses.sources(node))
    return placed & read


def _recomputing(
    uses: Uses, own: Group, node: Node, readers: Mapping[int, Group], stored: Container[Node]
) -> dict[int, Group]:
    """The readers of another group's node that recompute it; empty if loading it is cheaper."""
    if any(user not in uses.computed for user in uses.readers(node)):
        return {}
    chain_and_leaves = _chain(uses, own, node, stored)
    if chain_and_leaves is None:
        return {}
    chain, leaves = chain_and_leaves
    num_read = sum(_elements_read(uses, group, node) for group in readers.values())
    if RARE * num_read > num_elements(node) and not _is_little_work(uses, chain, node):
        return {}
    changed = {k: _absorbing(group, chain) for k, group in readers.items()}
    written = sum(num_bytes(leaf) for leaf in leaves if leaf in own and leaf not in stored)
    before = num_bytes(node) + sum(_bytes_read(uses, group) for group in readers.values())
    after = written + sum(_bytes_read(uses, group) for group in changed.values())
    return changed if after < before and all(map(uses.agrees, changed.values())) else {}


def _absorbing(group: Group, chain: frozenset[Node]) -> Group:
    return replace(group, absorbed=group.absorbed | (chain - set(group.places)))


def _chain(
    uses: Uses, group: Group, node: Node, stored: Container[Node]
) -> tuple[frozenset[Node], set[Node]] | None:
    """The nodes to recompute `node` from, and their inputs; None if there are too many of either."""
    chain, leaves, stack = set[Node](), set[Node](), [node]
    while stack:
        now = stack.pop()
        is_leaf = now is not node and (now not in group or now in stored)
        if is_leaf or not isinstance(rule_of(now), Pointwise):
            leaves.add(now)
        elif now not in chain:
            chain.add(now)
            stack.extend(uses.sources(now))
    is_small = node in chain and len(chain) <= MAX_CHAIN and len(leaves) <= MAX_LEAVES
    return (frozenset(chain), leaves) if is_small else None


def _is_little_work(uses: Uses, chain: Container[Node], node: Node) -> bool:
    computed = {member for member in uses.computed if member in chain} | uses.inlined
    space = space_of(node)
    reader = KernelReader(uses.views, computed, space, keeps_casts=False)
    value = reader.read(node, Point(space.results))
    return all(part.op not in _WORK for part in every_part([value]))


def _bytes_read(uses: Uses, group: Group) -> int:
    """Bytes that a group reads, those of each tensor once."""
    elements: dict[Node, int] = {}
    for read, place in _reads(uses, group):
        elements[read] = elements.get(read, 0) + hint_of(num_places(place))
    return sum(min(count, num_elements(n)) * val_of(n).element_size() for n, count in elements.items())


def _elements_read(uses: Uses, group: Group, node: Node) -> int:
    return sum(hint_of(num_places(place)) for read, place in _reads(uses, group) if read is node)


def _reads(uses: Uses, group: Group) -> set[tuple[Node, tuple[Index, ...]]]:
    """What a group reads from memory, and where."""
    elements = (read for node, place in group.places.items() for read in uses.reads(node, place, group))
    return {(read, at.indices) for read, at in elements if read not in group.places}
