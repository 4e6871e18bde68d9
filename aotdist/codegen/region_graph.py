"""Where a graph is cut into layers, a region as a graph of its own, and which regions are equal.

A region's graph is built anew, without the names and lines of the program, so that it is the same for equal
regions. A layer begins where the least is lost that a compiler would fuse: a sum onto the residual stream
stays with the norm that reads it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from aotdist.codegen.fx import attribute_of
from aotdist.codegen.layers import equal_parts
from aotdist.partition.recomputable import is_border
from aotdist.partition.traits import is_view, storage_root, value_bytes
from aotdist.program import Graph, Slot
from aotdist.torch_seam.nodes import inputs_of
from aotdist.torch_seam.proxies import graph_module
from aotdist.torch_seam.symbols import expression


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Nodes of a graph: between two collectives, or of one layer.

    Args:
        nodes: in order.
        ins: what they read of other nodes, in order of the first use; behind them, symbols in their sizes.
        outs: those of the nodes that others read.
        writes: of `outs`, new values of arguments that nobody reads behind them, with these.
    """

    nodes: tuple[Node, ...]
    ins: tuple[Node, ...]
    outs: tuple[Node, ...]
    writes: Mapping[Node, Node] = field(default_factory=dict[Node, Node])

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Segment:
        """These nodes, with what they read and what is read of them."""
        inside = set(nodes)
        read = dict.fromkeys(used for node in nodes for used in inputs_of(node))
        ins = tuple(used for used in read if used not in inside)
        return cls(tuple(nodes), ins, tuple(node for node in nodes if not inside.issuperset(node.users)))


def arguments_of(segment: Segment, gm: GraphModule) -> list[Node]:
    """A region's arguments; subgraphs that its operators take are part of the region."""
    return [node for node in segment.ins if not _is_graph(node, gm)]


def _is_graph(node: Node, gm: GraphModule) -> bool:
    return node.op == "get_attr" and isinstance(attribute_of(gm, node), GraphModule)


def tensors_of(node: Node) -> Iterator[torch.Tensor]:
    """The fake tensors that a node computes."""
    val = node.meta.get("val")
    values = val if isinstance(val, tuple | list) else (val,)
    yield from (value for value in values if isinstance(value, torch.Tensor))


_PLACES = frozenset({"source", "module", "function", "unit", "seq_nr", "serial", "policy", "stack_trace"})
"""Metadata that says where in the program a node comes from, and does not affect what is compiled."""


def region_graph(segment: Segment, gm: GraphModule) -> Graph:
    """A region as a graph of its own, the same for all that are equal up to names."""
    graph, root, copies = torch.fx.Graph(), torch.nn.Module(), dict[Node, Node]()
    for position, node in enumerate(arguments_of(segment, gm)):
        copies[node] = graph.placeholder(f"x{position}")
        copies[node].meta = {"val": node.meta["val"]}
    for position, node in enumerate(segment.ins):
        if _is_graph(node, gm):
            setattr(root, f"graph_{position}", attribute_of(gm, node))
            copies[node] = graph.get_attr(f"graph_{position}")
    for node in segment.nodes:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
        copies[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        copies[node].meta = {key: value for key, value in node.meta.items() if key not in _PLACES}
    graph.output(tuple(copies[node] for node in segment.outs))
    ins = tuple(Slot("primal", node.name) for node in graph.find_nodes(op="placeholder"))
    outs = tuple(
        Slot("write", copies[segment.writes[node]].name)
        if node in segment.writes
        else Slot("kept", f"y{position}")
        for position, node in enumerate(segment.outs)
    )
    return Graph(graph_module(root, graph), ins, outs)


def kind_of(segment: Segment, gm: GraphModule) -> Hashable:
    """Equal for regions that are compiled to the same: operators, constants, metadata of tensors.

    Args:
        segment: a region.
        gm: the graph that it is a part of.
    """
    kinds = _Kinds(gm)
    arguments, nodes = tuple(map(kinds.argument, segment.ins)), tuple(map(kinds.node, segment.nodes))
    return arguments, nodes, kinds.of(segment.outs), kinds.of(dict(segment.writes))


class _Kinds:
    """Hashable descriptions of nodes, equal up to names.

    Args:
        gm: the nodes' module.
    """

    def __init__(self, gm: GraphModule) -> None:
        self._gm = gm
        self._at = defaultdict[Any, int](itertools.count().__next__)  # in the order of the first use

    def argument(self, node: Node) -> Hashable:
        """An argument, or a graph inside of the graph."""
        number = self._at[node]
        if not _is_graph(node, self._gm):
            val = node.meta.get("val")
            return number, self.of(val), _alignment(val) if isinstance(val, torch.Tensor) else None
        held: GraphModule = attribute_of(self._gm, node)
        inner = _Kinds(held)
        return number, *map(inner.inside, held.graph.nodes)

    def inside(self, node: Node) -> Hashable:
        """A node of a graph inside of the graph, whose constants are its own."""
        if node.op in ("call_function", "output"):
            return self.node(node)
        held = attribute_of(self._gm, node) if node.op == "get_attr" else None
        return self.argument(node), id(held) if isinstance(held, torch.Tensor) else None

    def node(self, node: Node) -> Hashable:
        """A node that computes something."""
        plain = [(key, value) for key, value in node.meta.items() if type(value) in (bool, int, str)]
        meta = tuple(sorted(item for item in plain if item[0] not in _PLACES))
        arguments = self.of((node.args, node.kwargs))
        start = self.of(_start(node.args[0])) if node.target is _AS_STRIDED else None
        operator = id(node.target)  # PyTorch hashes an operator in Python, each time that a kind is looked up
        return self._at[node], operator, arguments, meta, self.of(node.meta.get("val")), start

    def of(self, value: Any) -> Hashable:
        """A value of a graph: a constant, a tensor's metadata, or something with these in it."""
        kind: Any = type(value)
        if kind is Node:
            return "node", self._at[value]
        if kind in _PLAIN:
            return kind, value
        match value:
            case torch.Tensor():
                facts = metadata(value)
                return tuple(map(self.of, facts)) if torch.SymInt in map(type, facts) else facts
            case dict():
                return tuple((self.of(key), self.of(item)) for key, item in value.items())
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return kind, expression(value)
            case slice():
                return kind, self.of((value.start, value.stop, value.step))
            case list() | tuple():
                return kind, *map(self.of, value)
            case _:
                return kind, repr(value) if isinstance(value, float) else value


_PLAIN = frozenset({int, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def metadata(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """What compiled code knows of a tensor that a graph computes."""
    layout = (*tensor.shape, *tensor.stride(), tensor.dtype, tensor.device)
    return (*layout, tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference())


_AS_STRIDED = torch.ops.aten.as_strided.default
"""The one operator that counts from where memory begins, not from where its argument does."""


def _start(node: Any) -> Any:
    return node.meta["val"].storage_offset()


def _alignment(tensor: torch.Tensor) -> Hashable:
    """What compiled code may know of the address: whether vectors of 16 bytes begin there."""
    start = tensor.storage_offset() * tensor.itemsize
    return expression(start) if isinstance(start, torch.SymInt) else start % 16


def where_layers_begin(nodes: Sequence[Node]) -> list[int]:
    """Positions at which to cut a row of operators so that its equal layers stand alone, in order.

    Args:
        nodes: `call_function` nodes, in the order in which they run.
    """
    computing = [not is_view(node) and node.target is not operator.getitem for node in nodes]
    return equal_parts(_forms(nodes), _losses(nodes), computing)


def _forms(nodes: Sequence[Node]) -> list[Hashable]:
    """Operators up to names: what each computes, its numbers, metadata of what it reads and makes."""
    numbers = dict[str, int]()

    @functools.cache
    def number(node: Node) -> int:
        """Of what a node is known to make, among all of this graph."""
        value = tuple(map(metadata, tensors_of(node))) or node.meta.get("val")
        return numbers.setdefault(repr(value), len(numbers))

    arguments = (map_arg((node.args, node.kwargs), number) for node in nodes)  # type: ignore[arg-type]
    return [(node.target, repr(given), number(node)) for node, given in zip(nodes, arguments, strict=True)]


def _losses(nodes: Sequence[Node]) -> list[int]:
    """Bytes that a cut in front of each node, or of none, makes go through memory and would be fused without.

    What a library call makes or reads is in memory anyway, and so is what is read on its far side.
    """
    at = {node: position for position, node in enumerate(nodes)}
    borders = [0, *accumulate(map(is_border, nodes))]
    changes = [0] * (len(nodes) + 1)
    for reader, position in at.items():
        read = set() if is_view(reader) else set(map(storage_root, reader.all_input_nodes))
        for node in read & at.keys():
            made, size = at[node], value_bytes(node)
            if borders[made] == borders[position + 1]:
                changes[made + 1] += size
                changes[position + 1] -= size
    return list(accumulate(changes))
