"""Editing a pass's private copy: move nodes, insert operators with their fake values."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Container, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.fx.node import map_arg

from aotdist.partition.traits import is_effectful
from aotdist.torch_seam.nodes import Appender
from aotdist.trace.known_results import KnownResults

_INHERITED = ("phase", "source", "module", "seq_nr", "unit")


def walk(first: Node, last: Node) -> Iterator[Node]:
    """The nodes from `first` to `last`, both included; `last` must not stand before `first`."""
    node = first
    while node is not last:
        assert node.op != "root", f"`{last.name}` stands before `{first.name}`"
        yield node
        node = node.next
    yield last


def hoist(node: Node, before: Node, barred: Container[Node]) -> bool:
    """Moves `node`, and what it needs, ahead of `before`; says whether that is possible.

    It is not when that would move a `barred` node or one with an effect. What `node` needs of the nodes
    right from `before` on stays where it is.
    """
    needed = {node}
    for candidate in reversed(list(walk(before, node))):
        if candidate in needed:
            needed.update(candidate.all_input_nodes)
    wanted = [n for n in walk(before, node) if n in needed]
    if any(n in barred or is_effectful(n) for n in wanted):
        return False
    while before in needed and before is not node:
        before = before.next
    for n in wanted:
        if before < n:
            before.prepend(n)
    return True


def sink(nodes: Collection[Node], first: Node, after: Node) -> bool:
    """Moves `nodes`, and what uses them, behind `after`; says whether that is possible.

    It is not when `after` depends on them, or when that would move an effect.

    Args:
        nodes: what to move.
        first: a node that does not stand behind any of `nodes`: where to start looking.
        after: what they shall follow.
    """
    reached = set(nodes)
    for candidate in walk(first, after):
        if any(i in reached for i in candidate.all_input_nodes):
            reached.add(candidate)
    moved = [n for n in walk(first, after) if n in reached]
    if any(n is after or is_effectful(n) for n in moved):
        return False
    anchor = after
    for n in moved:
        anchor.append(n)
        anchor = n
    return True


def emit(
    graph: FxGraph,
    target: Any,
    args: tuple[Any, ...],
    like: Node,
    name: str | None = None,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    known: KnownResults | None = None,
) -> Node:
    """Adds an operator at the graph's insertion point, with the fake value that it gives.

    Args:
        graph: the graph that is edited.
        target: the operator.
        args: its arguments.
        like: the node whose source line, module and phase it takes.
        name: what it is called.
        kwargs: more arguments.
        known: remembers fake results, for a pass that adds the same nodes for each layer.
    """
    meta = {key: like.meta[key] for key in _INHERITED if key in like.meta}
    vals = map_arg(args, lambda n: n.meta["val"])
    compute = functools.partial(target, *vals, **kwargs)
    with torch.no_grad():
        if known is None or target is operator.getitem:
            meta["val"] = compute()
        else:
            meta["val"] = known.result(known.key(target, vals, kwargs), vals, kwargs, compute)
    return Appender(graph).add("call_function", target, args, dict(kwargs), name, meta)


def erase_unused(graph: FxGraph, node: Node) -> None:
    """Erases `node`, and what was computed only for it."""
    pending = {node: None}
    while pending:
        candidate, _ = pending.popitem()
        if candidate.users or candidate.op != "call_function" or is_effectful(candidate):
            continue
        pending.update(dict.fromkeys(candidate.all_input_nodes))
        graph.erase_node(candidate)
