"""Nodes of graphs, made in bulk."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _illegal_names
from torch.fx.node import _fx_map_arg, _NodeBase

_NAMES: dict[Any, str] = {}
"""What nodes are called by default, by target."""


class Appender:
    """Adds nodes at a graph's insertion point.

    `Graph.create_node` takes 21 us for one with its `meta`, this 2: from torch 2.13 on that looks for raw
    symbols in all arguments, and each assignment to a node looks the node up.

    Args:
        graph: gets the nodes.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._named: dict[Node, str] = graph._graph_namespace._obj_to_name
        self._table: Any = graph._find_nodes_lookup_table.table
        self._calls: dict[int, dict[Node, None]] = {}
        """The calls of each function: PyTorch hashes operators in Python, in 0.35 us."""

    def add(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        name: str | None,
        meta: Mapping[str, Any],
        type_expr: Any = None,
    ) -> Node:
        """A node whose arguments are in the form that nodes store; without a name, named after its target."""
        graph = self._graph
        if name is None:
            name = _NAMES.get(target) or _NAMES.setdefault(target, graph._target_to_str(target))
        name = _free_name(graph, name)
        node = Node.__new__(Node)
        _NodeBase.__init__(node, graph, name, op, target, type_expr)
        node._update_args_kwargs(args, kwargs)
        node.meta.update(meta)
        self._named[node] = name
        graph._insert(node)
        calls = self._calls.get(id(target)) if op == "call_function" else self._table[op, None]
        if calls is None:
            calls = self._calls[id(target)] = self._table[op, target]
        calls[node] = None
        graph._len += 1
        return node

    def copy(self, node: Node, now: Callable[[Node], Any], name: str | None) -> Node:
        """The same operation on what `now` gives for each node; `name` as in `add`."""
        args, kwargs = _fx_map_arg(node._args, now), node._kwargs and _fx_map_arg(node._kwargs, now)
        return self.add(node.op, node.target, args, kwargs, name, node.meta, node.type)


def _free_name(graph: Graph, like: str) -> str:
    """What FX calls a node that is to be called `like`, in 0.3 us instead of 1.6."""
    names = graph._graph_namespace
    used, counts = names._used_names, names._base_count
    if like not in used and like.isidentifier() and like.isascii() and like not in _illegal_names:
        used.add(like)
        return like
    if like not in used or like[-1].isdigit():
        return names.create_name(like, None)
    number = counts.get(like, 0) + 1
    while (name := f"{like}_{number}") in used:
        number += 1
    used.add(name)
    counts[like] = number
    return name


def calls_of(graph: Graph, is_wanted: Callable[[Node], bool]) -> list[Node]:
    """The calls whose function is wanted, in order; `is_wanted` gets the first call of each function."""
    kinds = graph._find_nodes_lookup_table.table.items()
    calls = (nodes for (op, _), nodes in kinds if op == "call_function" and nodes)
    return sorted(node for nodes in calls if is_wanted(next(iter(nodes))) for node in nodes)


def all_nodes(gm: GraphModule) -> Iterator[Node]:
    """The nodes of a graph, and of the graphs that its operators take."""
    for inner in gm.modules():
        if isinstance(inner, GraphModule):
            yield from inner.graph.nodes


inputs_of: Callable[[Node], Mapping[Node, None]] = operator.attrgetter("_input_nodes")
"""The nodes that a node is given, each once, in 0.04 us; `all_input_nodes` lists them in 0.3."""


def is_erased(node: Node) -> bool:
    """Whether a node was taken out of its graph."""
    return node._erased


def copied_graph(graph: Graph) -> Graph:
    """The same graph in nodes of its own; what their `meta` holds is shared."""
    copies, appender = dict[Node, Node](), Appender(made := Graph(tracer_cls=graph._tracer_cls))
    for node in graph.nodes:
        copies[node] = appender.copy(node, copies.__getitem__, node.name)
    made._codegen = copy.deepcopy(graph._codegen)
    return made


def spell_number(number: Any, symbols: Mapping[str, torch.fx.Node], graph: torch.fx.Graph) -> Any:
    """Nodes at the graph's insertion point that compute a symbolic number from nodes of the symbols."""
    expr = number.node.expr
    return number.node.hint if expr.is_number else spell(expr, symbols, graph)


def spell(expr: Any, symbols: Mapping[str, torch.fx.Node], graph: torch.fx.Graph) -> torch.fx.Node:
    """Nodes at the graph's insertion point that compute an expression from nodes of its symbols."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    tracer = torch.fx.proxy.GraphAppendingTracer(graph)

    def recorded(function: Callable[..., Any]) -> Any:
        """Beneath autograd these do not ask a proxy: they take it for a number."""
        return staticmethod(lambda *args: tracer.create_proxy("call_function", function, args, {}))

    instead = {"maximum": torch.sym_max, "minimum": torch.sym_min, "not_": torch.sym_not}
    made_of = {name: recorded(function) for name, function in instead.items()}
    analysis = type("Analysis", (PythonReferenceAnalysis,), made_of)
    env: Any = {symbol: torch.fx.Proxy(symbols[str(symbol)], tracer) for symbol in expr.free_symbols}
    node = sympy_interp(analysis, env, expr).node
    for made in graph.nodes:
        if "val" not in made.meta and made.op == "call_function":
            made.meta["val"] = made.target(*torch.fx.node.map_arg(made.args, lambda n: n.meta["val"]))
    return node
