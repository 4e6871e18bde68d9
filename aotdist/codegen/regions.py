"""Parts of a graph that are equal up to names, compiled once.

A graph that communicates is cut where it does. Collectives stay where the schedule put them, and so does what
puts parameters into their buckets; what computes in between is a region. Another graph is cut where its
layers begin (`codegen/layers.py`). Regions of equal layers are equal (`codegen/region_graph.py`). They are
compiled once and called for each layer with the tensors of that layer, boxed. The compile cache knows a
region by its form, too: a deep model finds what a shallow one of its width left.

Values do not change: a region is called with arguments like those that it was compiled for, down to strides
and shared memory, and Inductor keeps the traced strides of its results.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from torch.fx import GraphModule, Node

from aotdist.codegen.contract import Backend, CompiledRegion, Emission, Emitted
from aotdist.codegen.fx import load_graph, print_graph
from aotdist.codegen.in_place import new_values
from aotdist.codegen.kernel_batch import kernels_together
from aotdist.codegen.region_graph import (
    Segment,
    arguments_of,
    kind_of,
    region_graph,
    tensors_of,
    where_layers_begin,
)
from aotdist.errors import UnsupportedProgram
from aotdist.partition.traits import is_collective, is_size, is_view, is_wait, storage_root
from aotdist.program import Graph
from aotdist.torch_seam.inductor import moves_collectives
from aotdist.torch_seam.nodes import Appender
from aotdist.torch_seam.proxies import graph_module
from aotdist.torch_seam.symbols import expression, surely_equal, symbols_in
from aotdist.torch_seam.tensors import StorageWeakRef

WORTH_IT = 0.75
"""Which share of the nodes must be left to compile, at most. Two equal layers of a Llama are not worth it,
three are: what fuses across a cut, and the choice of layouts there, are lost."""


@dataclass(frozen=True, slots=True, eq=False)
class RegionCall:
    """A region where it stands.

    Args:
        segment: its nodes.
        graph: them alone, the same for all regions of a kind.
        emission: what is known of that graph.
        kind: equal for regions that are compiled to the same, see `kind_of`.
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
        with kernels_together():
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
    traced = [node.meta["val"].stride() for node in graph.results() if node is not None]
    chosen = emitted.output_strides
    return chosen is None or all(
        strides is not None and surely_equal(strides, expected)
        for strides, expected in zip(chosen, traced, strict=True)
    )


# Where a graph is cut.


def parts_of(graph: Graph, emission: Emission) -> list[Node | RegionCall]:
    """The nodes of a graph in order, with its regions in their places; empty if it cannot be cut."""
    placeholders, symbols = graph.placeholders(), _symbols(graph)
    numbers = dict[Hashable, int]()

    @functools.cache
    def kind_number(segment: Segment) -> int:
        return numbers.setdefault(kind_of(segment, graph.gm), len(numbers))

    cut = _cut_up(graph, kind_number)
    order = [node for part in cut for node in (part.nodes if isinstance(part, Segment) else (part,))]
    at = {node: position for position, node in enumerate(order)}
    writes = _writes(graph, at) if emission.kind == "inference" else {}
    static = {placeholders[position] for position in emission.static_ins}
    saved = {placeholders[position] for position in emission.saved_ins}
    graphs = dict[Hashable, Graph | None]()

    def called(segment: Segment) -> RegionCall | None:
        if symbols or writes:
            ins, stored = _with_symbols(segment, symbols), _stored(segment, writes, at)
            segment = replace(segment, ins=ins, writes=stored)
        arguments = arguments_of(segment, graph.gm)
        static_ins = frozenset(at for at, node in enumerate(arguments) if node in static)
        saved_ins = frozenset(at for at, node in enumerate(arguments) if node in saved)
        kind = (kind_number(segment), static_ins, saved_ins)
        if kind not in graphs:
            is_compilable = _is_compilable(segment, graph.gm)
            graphs[kind] = region_graph(segment, graph.gm) if is_compilable else None
        own_emission = replace(emission, static_ins=static_ins, saved_ins=saved_ins)
        own_graph = graphs[kind]
        return None if own_graph is None else RegionCall(segment, own_graph, own_emission, kind)

    parts = [called(part) if isinstance(part, Segment) else part for part in cut]
    return [] if None in parts else [part for part in parts if part is not None]


def _symbols(graph: Graph) -> dict[str, Node]:
    """The arguments that are symbols themselves, by name."""
    numbers = [node for node in graph.placeholders() if is_size(node)]
    return {expression(node.meta["val"]): node for node in reversed(numbers)}


def _with_symbols(segment: Segment, symbols: Mapping[str, Node]) -> tuple[Node, ...]:
    """What a region reads, and the symbols in its sizes."""
    if not symbols:
        return segment.ins
    values = (value for node in (*segment.ins, *segment.nodes) for value in tensors_of(node))
    names = {name for value in values for size in _numbers(value) for name in symbols_in(size)}
    return tuple(dict.fromkeys((*segment.ins, *(symbols[name] for name in sorted(names & symbols.keys())))))


def _numbers(value: torch.Tensor) -> Iterator[torch.SymInt]:
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    yield from (number for number in numbers if isinstance(number, torch.SymInt))


def _writes(graph: Graph, at: Mapping[Node, int]) -> dict[Node, tuple[Node, int]]:
    """New values of arguments, each with its argument and the position of the old value's last read."""
    read_until = dict[Node, int]()
    for reader, position in at.items():
        if reader.op != "output":
            read_until.update((storage_root(node), position) for node in reader.all_input_nodes)
    values = new_values(graph.gm, graph.ins, graph.outs)
    return {new: (argument, read_until.get(argument, 0)) for _, argument, new in values}


def _stored(
    segment: Segment, writes: Mapping[Node, tuple[Node, int]], at: Mapping[Node, int]
) -> dict[Node, Node]:
    """The new values that a region may write in place: nothing reads the old ones later, or by an alias."""
    memory, ins, last = Counter(map(_storage, segment.ins)), set(segment.ins), at[segment.nodes[-1]]
    candidates = ((new, *writes[new]) for new in segment.outs if new in writes)
    return {
        new: argument
        for new, argument, read_until in candidates
        if argument in ins and read_until <= last and memory[_storage(argument)] == 1
    }


def _storage(node: Node) -> int | None:
    val = node.meta.get("val")
    return StorageWeakRef(val.untyped_storage()).cdata if isinstance(val, torch.Tensor) else None


def _cut_up(graph: Graph, kind_number: Callable[[Segment], int]) -> list[Node | Segment]:
    held = graph.gm.graph.find_nodes(op="get_attr")  # which stand before their first use, in between
    nodes = [*held, *(node for node in graph.gm.graph.nodes if node.op != "get_attr")]
    if any(map(is_collective, nodes)):
        return _between_collectives(nodes, kind_number)
    computed = [node for node in nodes if node.op == "call_function"]
    segments = _layers(Segment.of(computed), where_layers_begin(computed))
    *inputs, output = (node for node in nodes if node.op != "call_function")
    return [*inputs, *segments, output] if len(segments) > 1 else []


def _layers(segment: Segment, begins: Sequence[int]) -> Sequence[Segment]:
    nodes = segment.nodes
    cuts = [(begin, end) for begin, end in pairwise([0, *begins, len(nodes)]) if begin < end]
    return [Segment.of(nodes[begin:end]) for begin, end in cuts] if len(cuts) > 1 else [segment]


def _between_collectives(
    nodes: Sequence[Node], kind_number: Callable[[Segment], int]
) -> list[Node | Segment]:
    fill = _fill_buckets(nodes)
    parts: list[Node | Segment] = []
    begins = dict[int, Sequence[int]]()  # by the number of a kind
    for is_boundary, run in groupby(nodes, _is_boundary):
        run = tuple(run)
        segment = Segment.of([node for node in run if node not in fill])
        if is_boundary or all(map(is_view, segment.nodes)) or not segment.outs:
            parts += run
            continue
        kind = kind_number(segment)
        if kind not in begins:
            begins[kind] = where_layers_begin(segment.nodes)
        parts += (*_layers(segment, begins[kind]), *filter(fill.__contains__, run))
    return parts


def _is_boundary(node: Node) -> bool:
    is_buffer = node.target is _EMPTY and all(map(is_collective, node.users))
    return node.op != "call_function" or is_collective(node) or is_wait(node) or is_buffer


_EMPTY = torch.ops.aten.empty.memory_format
_FILLS = frozenset({torch.ops.aten.view.default, torch.ops.aten.cat.default})


def _fill_buckets(nodes: Sequence[Node]) -> set[Node]:
    """The nodes that only concatenate arguments for a collective.

    They serve another layer than the nodes around them, and the last layers have none.
    """
    of_arguments = {node for node in nodes if node.op == "placeholder"}
    for node in nodes:
        if node.target in _FILLS and of_arguments.issuperset(node.all_input_nodes):
            of_arguments.add(node)
    found = set[Node]()
    for node in reversed(nodes):
        is_read = not all(map(found.__contains__, filter(_computes, node.users)))
        if node.target in _FILLS and node in of_arguments and not is_read:
            found.add(node)
    return found


def _computes(node: Node) -> bool:
    return node.op == "output" or not _is_boundary(node)


def _is_compilable(segment: Segment, gm: GraphModule) -> bool:
    """Whether a region takes tensors and symbols, returns tensors, and has sizes that are made of these."""
    arguments = [node.meta.get("val") for node in arguments_of(segment, gm)]
    argument_symbols = {expression(value) for value in arguments if isinstance(value, torch.SymInt)}
    values = [value for node in segment.nodes for value in tensors_of(node)]
    are_known = all(
        value.layout is torch.strided
        and argument_symbols.issuperset(name for size in _numbers(value) for name in symbols_in(size))
        for value in values
    )
    are_taken = all(isinstance(value, torch.Tensor | torch.SymInt) for value in arguments)
    return (
        are_known
        and are_taken
        and all(isinstance(node.meta.get("val"), torch.Tensor) for node in segment.outs)
    )


# The whole graph, with calls of its regions.


def _joined(
    graph: Graph, parts: Sequence[Node | RegionCall], emitted: Mapping[Hashable, Emitted], label: str
) -> Emitted:
    """The graph as a callable, which calls its regions."""
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
    """The graph with each region replaced by a call of it, and a `getitem` for each result."""
    made, copies = torch.fx.Graph(), dict[Node, Node]()
    appender = Appender(made)
    for part in parts:
        if isinstance(part, Node):
            copies[part] = appender.copy(part, copies.__getitem__, part.name)
            continue
        args = [copies[node] for node in arguments_of(part.segment, graph.gm)]
        place = {"module": _module_of(part.segment)}
        results = appender.add("call_function", regions[part.kind], (args,), {}, "results", place)
        for position, node in enumerate(part.segment.outs):
            picked = (results, position)
            copies[node] = appender.add("call_function", operator.getitem, picked, {}, node.name, node.meta)
    return Graph(graph_module(graph.gm, made), graph.ins, graph.outs)


def _module_of(segment: Segment) -> str:
    """The path of the innermost module that most of a region is of."""
    paths = [str(node.meta.get("module") or "").split(".") for node in segment.nodes]
    prefix = list[str]()
    while True:
        deeper = Counter(path[len(prefix)] for path in paths if path[: len(prefix)] == prefix != path)
        name, count = max(deeper.items(), key=operator.itemgetter(1), default=("", 0))
        if not name or 2 * count <= len(paths):
            return ".".join(prefix)
        prefix.append(name)
