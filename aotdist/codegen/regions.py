"""Parts of a graph that are equal up to names, compiled once.

A graph that communicates is cut where it does. Collectives stay where the schedule put them, and so does what
puts parameters into their buckets; what computes in between is a region. Each region is written anew, without
the names and lines of the program that it comes from, so that those of equal layers are equal. They are
compiled once and called for each layer with what is that layer's, boxed. The compile cache knows a region by
that form, too: a deep model finds what a shallow one of its width left.

Values do not change: a region is called with what it was compiled for, down to strides and shared memory, and
results that Inductor might lay out otherwise are told to lie as they were traced.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from aotdist.codegen.contract import Backend, CompiledRegion, Emission, Emitted
from aotdist.codegen.fx import attribute_of, load_graph, print_graph
from aotdist.errors import UnsupportedProgram
from aotdist.partition.traits import is_collective, is_view, is_wait
from aotdist.program import Graph, Slot
from aotdist.sizes import is_symbolic
from aotdist.torch_seam.inductor import moves_collectives
from aotdist.torch_seam.proxies import graph_module
from aotdist.torch_seam.tensors import StorageWeakRef

WORTH_IT = 0.75
"""Which share of the nodes must be left to compile, at most. Two equal layers of a Llama are not worth it,
three are: what fuses across a cut, and the choice of layouts there, are lost."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Nodes of a graph between two collectives.

    Args:
        nodes: in order.
        ins: what they read of other nodes, in order of the first use.
        outs: those of the nodes that others read.
    """

    nodes: tuple[Node, ...]
    ins: tuple[Node, ...]
    outs: tuple[Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RegionCall:
    """A region where it stands.

    Args:
        segment: its nodes.
        graph: them alone, the same for all regions of a kind.
        emission: what is known of that graph.
        kind: see `kind_of`.
    """

    segment: Segment
    graph: Graph
    emission: Emission
    kind: Hashable


def emit_by_regions(backend: Backend, graph: Graph, emission: Emission) -> Emitted:
    """Compile a graph by its regions if that saves work, and as a whole if not.

    Args:
        backend: compiles what it is given.
        graph: to be compiled.
        emission: what is known of it.
    """
    if backend.name != "inductor" or moves_collectives():  # other backends are quick, or the user's
        return backend.emit(graph, emission)
    parts = parts_of(graph, emission)
    kinds = {part.kind: part for part in parts if isinstance(part, RegionCall)}
    emitted = _emitted(backend, kinds) if _are_worth_it(parts, kinds) else None
    if emitted is None:
        return backend.emit(graph, emission)
    return _joined(graph, parts, emitted, f"{emission.name} {emission.kind}")


def _are_worth_it(parts: Sequence[Node | RegionCall], kinds: Mapping[Hashable, RegionCall]) -> bool:
    everything = sum(len(part.segment.nodes) for part in parts if isinstance(part, RegionCall))
    return sum(len(call.segment.nodes) for call in kinds.values()) <= WORTH_IT * everything and everything > 0


def _emitted(backend: Backend, kinds: Mapping[Hashable, RegionCall]) -> dict[Hashable, Emitted] | None:
    """A compiled region for each kind; None if one does not compile, or lays results out otherwise."""
    emitted: dict[Hashable, Emitted] = {}
    try:
        for kind, call in kinds.items():
            emitted[kind] = backend.emit(call.graph, call.emission)
            if not _lies_as_traced(call.graph, emitted[kind]):
                break
        else:
            return emitted
    except UnsupportedProgram:
        pass  # the whole graph tells the line of the program
    for one in emitted.values():
        one.finish()
    return None


def _lies_as_traced(graph: Graph, emitted: Emitted) -> bool:
    """Whether results have the strides that the regions behind are compiled for."""
    traced = [tuple(node.meta["val"].stride()) for node in graph.results() if node is not None]
    return emitted.output_strides is None or traced == list(emitted.output_strides)


# Where a graph is cut.


def parts_of(graph: Graph, emission: Emission) -> list[Node | RegionCall]:
    """A graph in the order in which it runs, with its regions; nothing for one that cannot be cut.

    Where sizes are symbols, or a step stores new values in its arguments, the compiler gets the whole.
    """
    if not any(is_collective(node) for node in graph.gm.graph.nodes):
        return []
    if emission.kind == "inference" and any(slot.role == "write" for slot in graph.outs):
        return []
    parts, placeholders = _cut_up(graph), graph.placeholders()
    if not all(_is_of_tensors(part, graph.gm) for part in parts if isinstance(part, Segment)):
        return []
    static = {placeholders[position] for position in emission.static_ins}
    saved = {placeholders[position] for position in emission.saved_ins}

    graphs = dict[Hashable, Graph]()

    def called(segment: Segment) -> RegionCall:
        arguments = _arguments(segment, graph.gm)
        static_ins = frozenset(at for at, node in enumerate(arguments) if node in static)
        saved_ins = frozenset(at for at, node in enumerate(arguments) if node in saved)
        kind = (kind_of(segment, graph.gm), static_ins, saved_ins)
        if kind not in graphs:
            graphs[kind] = region_graph(segment, graph.gm)
        known = replace(emission, static_ins=static_ins, saved_ins=saved_ins)
        return RegionCall(segment, graphs[kind], known, kind)

    return [called(part) if isinstance(part, Segment) else part for part in parts]


def _cut_up(graph: Graph) -> list[Node | Segment]:
    held = graph.gm.graph.find_nodes(op="get_attr")  # which stand before their first use, in between
    nodes = [*held, *(node for node in graph.gm.graph.nodes if node.op != "get_attr")]
    fill = _fill_buckets(nodes)
    found: list[Node | Segment] = []
    for is_boundary, run in groupby(nodes, _is_boundary):
        run = tuple(run)
        segment = _segment(tuple(node for node in run if node not in fill))
        if is_boundary or all(map(is_view, segment.nodes)) or not segment.outs:
            found += run
        else:
            found += (segment, *filter(fill.__contains__, run))
    return found


def _is_boundary(node: Node) -> bool:
    is_buffer = node.target is _EMPTY and all(map(is_collective, node.users))
    return node.op != "call_function" or is_collective(node) or is_wait(node) or is_buffer


_EMPTY = torch.ops.aten.empty.memory_format
_FILLS = frozenset({torch.ops.aten.view.default, torch.ops.aten.cat.default})


def _fill_buckets(nodes: Sequence[Node]) -> set[Node]:
    """What only puts arguments together for a collective.

    It is another layer's than what is computed around it, and missing there where no layer is left to gather.
    """
    given = {node for node in nodes if node.op == "placeholder"}
    for node in nodes:
        if node.target in _FILLS and given.issuperset(node.all_input_nodes):
            given.add(node)
    found = set[Node]()
    for node in reversed(nodes):
        is_read = not all(map(found.__contains__, filter(_computes, node.users)))
        if node.target in _FILLS and node in given and not is_read:
            found.add(node)
    return found


def _computes(node: Node) -> bool:
    return node.op == "output" or not _is_boundary(node)


def _segment(nodes: tuple[Node, ...]) -> Segment:
    inside = set(nodes)
    read = dict.fromkeys(used for node in nodes for used in node.all_input_nodes)
    ins = tuple(used for used in read if used not in inside)
    return Segment(nodes, ins, tuple(node for node in nodes if not inside.issuperset(node.users)))


def _is_of_tensors(segment: Segment, gm: GraphModule) -> bool:
    """Whether a region takes and returns tensors, all of whose sizes are known."""
    around = (node.meta.get("val") for node in (*_arguments(segment, gm), *segment.outs))
    values = [value for node in segment.nodes for value in _tensors(node)]
    is_known = all(value.layout is torch.strided and not is_symbolic(value.shape) for value in values)
    return is_known and all(isinstance(value, torch.Tensor) for value in around)


def _tensors(node: Node) -> Iterator[torch.Tensor]:
    val = node.meta.get("val")
    values = val if isinstance(val, tuple | list) else (val,)
    yield from (value for value in values if isinstance(value, torch.Tensor))


def _arguments(segment: Segment, gm: GraphModule) -> list[Node]:
    """What a region is called with: graphs inside of it are its own."""
    return [node for node in segment.ins if not _is_graph(node, gm)]


def _is_graph(node: Node, gm: GraphModule) -> bool:
    return node.op == "get_attr" and isinstance(attribute_of(gm, node), GraphModule)


# A region by itself, and which are equal.

_PLACES = frozenset({"source", "module", "function", "unit", "seq_nr", "serial", "policy", "stack_trace"})
"""What nodes say of the program that they come from, and that nothing is compiled by."""


def region_graph(segment: Segment, gm: GraphModule) -> Graph:
    """A region as a graph of its own, the same for all that are equal up to names."""
    graph, root, copies = torch.fx.Graph(), torch.nn.Module(), dict[Node, Node]()
    for position, node in enumerate(segment.ins):
        if _is_graph(node, gm):
            setattr(root, f"graph_{position}", attribute_of(gm, node))
            copies[node] = graph.get_attr(f"graph_{position}")
    for position, node in enumerate(_arguments(segment, gm)):
        copies[node] = graph.placeholder(f"x{position}")
        copies[node].meta = {"val": node.meta["val"]}
    for node in segment.nodes:
        args, kwargs = map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
        copies[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        copies[node].meta = {key: value for key, value in node.meta.items() if key not in _PLACES}
    graph.output(tuple(copies[node] for node in segment.outs))
    ins = tuple(Slot("primal", node.name) for node in graph.find_nodes(op="placeholder"))
    outs = tuple(Slot("kept", f"y{position}") for position in range(len(segment.outs)))
    return Graph(graph_module(root, graph), ins, outs)


def kind_of(segment: Segment, gm: GraphModule) -> Hashable:
    """What regions have in common that are compiled to the same: operators, constants, metadata of tensors.

    Args:
        segment: a region.
        gm: the graph that it is a part of.
    """
    kinds = _Kinds(gm, _Numbers())
    given, nodes = tuple(map(kinds.given, segment.ins)), tuple(map(kinds.node, segment.nodes))
    return given, nodes, kinds.of(segment.outs)


class _Numbers(dict[Any, int]):
    """Numbers what it is asked for, in order."""

    def __missing__(self, key: Any) -> int:
        return self.setdefault(key, len(self))


class _Kinds:
    """What nodes are up to their names.

    Args:
        gm: of which they are nodes.
        storages: numbers for memory, the same for graphs inside of graphs.
    """

    def __init__(self, gm: GraphModule, storages: _Numbers) -> None:
        self._gm = gm
        self._at = _Numbers()
        self._storages = storages

    def given(self, node: Node) -> Hashable:
        """What is known of an argument, or is a graph."""
        number = self._at[node]
        if not _is_graph(node, self._gm):
            return number, self.of(node.meta.get("val"))
        held: GraphModule = attribute_of(self._gm, node)
        inner = _Kinds(held, self._storages)
        return number, *map(inner.inside, held.graph.nodes)

    def inside(self, node: Node) -> Hashable:
        """A node of a graph inside of the graph, which nobody gives its constants."""
        if node.op in ("call_function", "output"):
            return self.node(node)
        held = attribute_of(self._gm, node) if node.op == "get_attr" else None
        return self.given(node), id(held) if isinstance(held, torch.Tensor) else None

    def node(self, node: Node) -> Hashable:
        """What is computed."""
        known = [(key, value) for key, value in node.meta.items() if type(value) in (bool, int, str)]
        meta = tuple(sorted(item for item in known if item[0] not in _PLACES))
        arguments = self.of((node.args, node.kwargs))
        return self._at[node], node.target, arguments, meta, self.of(node.meta.get("val"))

    def of(self, value: Any) -> Hashable:
        """A value of a graph: a constant, a tensor's metadata, or something with these in it."""
        match value:
            case Node():
                return "node", self._at[value]
            case torch.Tensor():
                return *_metadata(value), self._storages[StorageWeakRef(value.untyped_storage()).cdata]
            case dict():
                return tuple((key, self.of(item)) for key, item in value.items())
            case slice():
                return slice, self.of((value.start, value.stop, value.step))
            case list() | tuple():
                return type(value), *map(self.of, value)
            case _:
                return type(value), repr(value) if isinstance(value, float) else value


def _metadata(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    layout = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device)
    return (*layout, tensor.requires_grad, tensor.is_conj(), tensor.is_neg(), tensor.is_inference())


# The whole graph again.


def _joined(
    graph: Graph, parts: Sequence[Node | RegionCall], emitted: Mapping[Hashable, Emitted], label: str
) -> Emitted:
    """The graph as something to call, which calls its regions."""
    regions = {
        kind: CompiledRegion(one.call, f"region_{at}") for at, (kind, one) in enumerate(emitted.items())
    }
    whole = _with_calls(graph, parts, regions)
    printed, counts = print_graph(whole), Counter(part.kind for part in parts if isinstance(part, RegionCall))
    sources = (f"# {regions[kind].name}\n{one.source}" for kind, one in emitted.items())

    def finish() -> None:
        for one in emitted.values():
            one.finish()

    return Emitted(
        load_graph(printed, whole, label),
        "\n\n".join((printed.source, *sources)),
        finish=finish,
        else_fx=any(one.else_fx for one in emitted.values()),
        from_cache=all(one.from_cache for one in emitted.values()),
        regions=tuple(counts[kind] for kind in emitted),
    )


def _with_calls(
    graph: Graph, parts: Sequence[Node | RegionCall], regions: Mapping[Hashable, CompiledRegion]
) -> Graph:
    """The graph with a node in the place of each region, and one for each of its results."""
    made, copies = torch.fx.Graph(), dict[Node, Node]()
    for part in parts:
        if isinstance(part, Node):
            copies[part] = made.node_copy(part, copies.__getitem__)
            continue
        args = [copies[node] for node in _arguments(part.segment, graph.gm)]
        results = made.create_node("call_function", regions[part.kind], (args,), name="results")
        results.meta = {"module": _module_of(part.segment)}
        for position, node in enumerate(part.segment.outs):
            copies[node] = made.create_node(
                "call_function", operator.getitem, (results, position), name=node.name
            )
            copies[node].meta = dict(node.meta)
    return Graph(graph_module(graph.gm, made), graph.ins, graph.outs)


def _module_of(segment: Segment) -> str:
    """The path of the innermost module that most of a region is of."""
    paths = [str(node.meta.get("module") or "").split(".") for node in segment.nodes]
    found = list[str]()
    while True:
        deeper = Counter(path[len(found)] for path in paths if path[: len(found)] == found != path)
        name, count = max(deeper.items(), key=operator.itemgetter(1), default=("", 0))
        if not name or 2 * count <= len(paths):
            return ".".join(found)
        found.append(name)
