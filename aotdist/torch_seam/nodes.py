"""Nodes of graphs, made in bulk."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

_NAMES: dict[Any, str] = {}
"""What nodes are called by default, by target."""


def add_node(
    graph: Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str | None,
    meta: Mapping[str, Any],
    type_expr: Any = None,
) -> Node:
    """A node at the graph's insertion point, of arguments that another node has or had.

    `Graph.create_node` takes 21 us for one with its `meta`, this 8: from torch 2.13 on that looks for raw
    symbols in all arguments, and each assignment to a node looks the node up. Without a name it is called as
    its target.
    """
    if name is None:
        name = _NAMES.get(target) or _NAMES.setdefault(target, graph._target_to_str(target))
    name = graph._graph_namespace.create_name(name, None)
    node = Node(graph, name, op, target, args, kwargs, type_expr)
    node.meta.update(meta)
    graph._graph_namespace.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def is_erased(node: Node) -> bool:
    """Whether a node was taken out of its graph."""
    return node._erased


def copy_node(graph: Graph, node: Node, now: Callable[[Node], Any], name: str | None) -> Node:
    """The same operation in a graph, on what `now` gives for each node; `name` as in `add_node`."""
    args, kwargs = map_arg(node.args, now), map_arg(node.kwargs, now)
    return add_node(graph, node.op, node.target, args, kwargs, name, node.meta, node.type)


def copied_graph(graph: Graph) -> Graph:
    """The same graph in nodes of its own; what their `meta` holds is shared."""
    made, copies = Graph(tracer_cls=graph._tracer_cls), dict[Node, Node]()
    for node in graph.nodes:
        copies[node] = copy_node(made, node, copies.__getitem__, node.name)
    made._codegen = copy.deepcopy(graph._codegen)
    return made
