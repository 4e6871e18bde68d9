"""Joint graphs of repeated blocks, rewritten block by block.

Inductor's rewrites try their patterns on every node: 0.16 s for each layer of a Llama. So what a joint graph
computes in equal blocks, forward and backward, is taken out of it, rewritten once, and put in the place of
each. What is around the blocks is rewritten by itself. The compile cache has an entry for each part: a deep
model finds what a shallow one of its width left.

The graph is that of a rewrite of the whole, but where a pattern reaches beyond a block.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from aotdist.codegen.contract import Backend
from aotdist.codegen.fx import attribute_of
from aotdist.codegen.inductor_rewrites import restore_provenance
from aotdist.codegen.layers import SHORTEST
from aotdist.codegen.portable import is_plain_constant
from aotdist.codegen.region_graph import Segment, arguments_of, kind_of, region_graph
from aotdist.codegen.regions import WORTH_IT
from aotdist.errors import UnsupportedProgram
from aotdist.partition.traits import view_base
from aotdist.program import Graph, Slot
from aotdist.torch_seam.functional import FakeTensor, fake_on
from aotdist.torch_seam.inductor import rewrites_whole_graphs
from aotdist.torch_seam.nodes import Appender, inputs_of
from aotdist.torch_seam.proxies import graph_module


def prepared_by_blocks(backend: Backend, joint: Graph) -> Graph:
    """A joint or an inference graph as the backend prepares it; equal blocks are prepared once.

    Raises:
        UnsupportedProgram: the backend fails.
    """
    if backend.name != "inductor" or rewrites_whole_graphs():  # other backends have nothing to prepare
        return backend.prepare_joint(joint)
    owners = _owners(joint)
    kinds = list(_equal_blocks(joint, owners).values())
    inside = {node for segments in kinds for segment in segments for node in segment.nodes}
    around = [node for node in joint.gm.graph.nodes if node.op == "call_function" and node not in inside]
    num_rewritten = len(around) + sum(len(segments[0].nodes) for segments in kinds)
    if num_rewritten > WORTH_IT * (len(around) + len(inside)):
        return backend.prepare_joint(joint)
    rewriting = _Rewriting(backend, joint, owners)
    try:
        parts = [part for segments in ([Segment.of(around)], *kinds) for part in rewriting.parts(segments)]
    except UnsupportedProgram:
        return backend.prepare_joint(joint)  # which tells the line of the program
    return _Assembly(joint, parts).graph()


def _owners(joint: Graph) -> set[Node]:
    """The nodes in whose memory the program's outputs lie."""
    named = joint.named_results().items()
    return {view_base(node) for slot, node in named if node is not None and slot.role == "output"}


# Equal blocks.


def _equal_blocks(joint: Graph, owners: set[Node]) -> dict[Hashable, list[Segment]]:
    """The nodes of modules that compute the same up to names, grouped by kind; largest modules first.

    A block is a module with a number in its path: `encoder.layers.3`, or in it `encoder.layers.3.experts.0`.
    """
    left = [node for node in joint.gm.graph.nodes if node.op == "call_function" and node.meta.get("module")]
    equal_blocks: dict[Hashable, list[Segment]] = {}
    level = 0
    while left:
        blocks = dict[str, list[Node]]()
        for node in left:
            if path := _path_to_number(node.meta["module"], level):
                blocks.setdefault(path, []).append(node)
        kinds: dict[Hashable, list[Segment]] = {}
        for segment in (Segment.of(nodes) for nodes in blocks.values() if len(nodes) >= SHORTEST):
            kind = kind_of(segment, joint.gm), tuple(view_base(node) in owners for node in segment.outs)
            kinds.setdefault(kind, []).append(segment)
        equal = {kind: segments for kind, segments in kinds.items() if len(segments) > 1}
        inside = {node for segments in equal.values() for segment in segments for node in segment.nodes}
        left = [node for nodes in blocks.values() for node in nodes if node not in inside]
        equal_blocks |= equal
        level += 1
    return equal_blocks


@functools.cache
def _path_to_number(path: str, level: int) -> str:
    """A path up to its number at `level`, the first of which is at 0; nothing if there are less numbers."""
    parts = path.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[level] + 1]) if level < len(numbers) else ""


# The parts and their rewrites.


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Nodes of a joint graph, and the graph that replaces them.

    Args:
        segment: the nodes.
        graph: replaces them.
    """

    segment: Segment
    graph: Graph

    def origin(self, node: Node) -> Node | None:
        """The segment's node that a node of `graph` comes from; None for one that the rewrite added."""
        position = node.meta.get("serial", len(self.segment.nodes))
        return self.segment.nodes[position] if position < len(self.segment.nodes) else None

    def outer(self, node: Node) -> Node | None:
        """The node outside of the segment that a node of `graph` stands for; None if it is computed."""
        position = node.meta.get("serial", 0) - len(self.segment.nodes)
        return self.segment.ins[position] if position >= 0 else None


class _Rewriting:
    """Has the backend rewrite parts of a joint graph.

    Rewrites drop `x + 0`, whoever makes the 0: a part that is given a constant makes it itself.

    Args:
        backend: whose rewrites these are.
        joint: the graph.
        owners: see `_owners`.
    """

    def __init__(self, backend: Backend, joint: Graph, owners: set[Node]) -> None:
        self._backend = backend
        self._joint = joint
        self._owners = owners
        self._constants = dict[Node, _Constant]()
        for node in joint.gm.graph.find_nodes(op="get_attr"):
            held = attribute_of(joint.gm, node)
            if isinstance(held, torch.Tensor) and is_plain_constant(held) and held.numel() == 1:
                self._constants[node] = _Constant(f"{held.dtype} {held.item()}", held)

    def parts(self, equal: Sequence[Segment]) -> Iterator[_Part]:
        """A part for each of some equal segments; constants that they compute are remembered."""
        graphs: dict[Hashable, Graph] = {}
        for segment in equal:
            constants = self._constants_into(segment)
            key = tuple(constants[node].text if node in constants else None for node in segment.ins)
            if key not in graphs:
                graphs[key] = self._rewritten(segment, constants)
            yield _Part(segment, graphs[key])
            for node, result in zip(segment.outs, graphs[key].results(), strict=True):
                if result is not None and result.target is _FULL and not result.all_input_nodes:
                    text = f"{result.args} {result.kwargs}"
                    self._constants[node] = _Constant(text, _FULL, result.args, result.kwargs)

    def _constants_into(self, segment: Segment) -> Mapping[Node, _Constant]:
        """The inputs that are constants, to be made inside; not `full`s if the segment has program outputs.

        A rewrite would return such a constant in the place of an output that is a copy of it.
        """
        has_outputs = any(view_base(node) in self._owners for node in segment.outs)
        into = ((node, self._constants[node]) for node in segment.ins if node in self._constants)
        return {node: constant for node, constant in into if not has_outputs or constant.held is not _FULL}

    def _rewritten(self, segment: Segment, constants: Mapping[Node, _Constant]) -> Graph:
        """The rewritten segment; a node's `serial` is the position of its origin in `nodes`, then `ins`."""
        graph = region_graph(segment, self._joint.gm)
        nodes, arguments = graph.gm.graph, arguments_of(segment, self._joint.gm)
        computing = [node for node in nodes.nodes if node.op == "call_function"]
        for position, node in enumerate(computing):
            node.meta["serial"] = position
        positions = {node: position for position, node in enumerate(segment.ins, len(computing))}
        ins = dict[Slot, int]()
        for placeholder, slot, argument in zip(graph.placeholders(), graph.ins, arguments, strict=True):
            constant = constants.get(argument)
            if constant is None:
                ins[slot] = positions[argument]
                continue
            with nodes.inserting_before(computing[0]):
                made = constant.put(graph.gm, placeholder)
            made.meta["serial"] = positions[argument]
            placeholder.replace_all_uses_with(made)
            nodes.erase_node(placeholder)
        # Slots of the role `output` make the backend keep these results in memory of their own.
        outs = (
            Slot("output", slot.path) if view_base(node) in self._owners else slot
            for node, slot in zip(segment.outs, graph.outs, strict=True)
        )
        rewritten = self._backend.prepare_joint(Graph(graph.gm, tuple(ins), tuple(outs)))
        # Restored, since a rewrite that leaves `x` of `x + 0` copies the sum's metadata to `x`.
        for placeholder, position in zip(rewritten.placeholders(), ins.values(), strict=True):
            placeholder.meta["serial"] = position
        return rewritten


@dataclass(frozen=True, slots=True, eq=False)
class _Constant:
    """A tensor that is the same in all calls.

    Args:
        text: the same for equal constants.
        held: the tensor, of one element; or the operator that makes it.
        args: of the operator.
        kwargs: of the operator.
    """

    text: str
    held: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def put(self, gm: GraphModule, argument: Node) -> Node:
        """A node in the place of an argument, at the insertion point of its graph."""
        appender = Appender(gm.graph)
        if not isinstance(self.held, torch.Tensor):
            return appender.add("call_function", self.held, self.args, dict(self.kwargs), None, argument.meta)
        name = f"held_{argument.name}"
        setattr(gm, name, self.held)
        return appender.add("get_attr", name, (), {}, name, argument.meta)


_FULL = torch.ops.aten.full.default


# The whole graph, put together from parts.

_Place: TypeAlias = tuple[int, Node]
"""A node of a part: the part's position, and the node in its graph."""


class _Assembly:
    """Puts parts in the places of the nodes that they were made of, in the order of these.

    Args:
        joint: the graph.
        parts: each of its nodes that computes something is in one.
    """

    def __init__(self, joint: Graph, parts: Sequence[_Part]) -> None:
        self._joint = joint
        self._parts = parts
        self._made = torch.fx.Graph()
        self._appender = Appender(self._made)
        self._root = torch.nn.Module()
        self._made_at: dict[_Place, Node] = {}
        self._makers = dict[Node, _Place | Node]()  # of the nodes of `joint` that parts read
        for node in joint.placeholders():
            self._makers[node] = self._appender.copy(node, lambda read: read, node.name)
        for at, part in enumerate(parts):
            for result, node in zip(part.graph.results(), part.segment.outs, strict=True):
                assert result is not None, "a part returns what others read"
                self._makers[node] = at, result

    def graph(self) -> Graph:
        """The graph."""
        for place in self._in_order():
            self._make(place)
        self._made.output(tuple(map(self._result, self._joint.results())))
        made = Graph(graph_module(self._root, self._made), self._joint.ins, self._joint.outs)
        restore_provenance(made)
        return made

    def _in_order(self) -> list[_Place]:
        """Nodes to make, in the joint graph's order; one that a rewrite added, ahead of what follows it."""
        stood = {node: position for position, node in enumerate(self._joint.gm.graph.nodes)}
        places = list[tuple[int, int, int, Node]]()
        for at, part in enumerate(self._parts):
            position = len(stood)
            for back, node in enumerate(reversed(part.graph.gm.graph.nodes)):
                if node.op == "call_function" and part.outer(node) is None:
                    origin = part.origin(node)
                    position = position if origin is None else min(position, stood[origin])
                    places.append((position, at, -back, node))
        return [(at, node) for _, at, _, node in sorted(places, key=lambda each: each[:3])]

    def _make(self, place: _Place) -> None:
        """Make a node, after those of its inputs that were not made yet."""
        pending = [place]
        while pending:
            at, node = pending[-1]
            inputs = {read: self._made_or_place((at, read)) for read in inputs_of(node)}
            missing = [other for other in inputs.values() if not isinstance(other, Node)]
            pending += reversed(missing)
            if not missing and pending.pop() not in self._made_at:
                self._made_at[at, node] = self._copied(at, node, inputs)

    def _made_or_place(self, place: _Place) -> _Place | Node:
        """The node that was made for a place; if none was, the place where it is computed."""
        at, node = place
        while (origin := self._parts[at].outer(node)) is not None:
            maker = self._maker(origin)
            if isinstance(maker, Node):
                return maker
            place = at, node = maker
        return self._made_at.get(place, place)

    def _maker(self, node: Node) -> _Place | Node:
        """What replaces a node of the joint graph: a place in a part, an argument, or a held tensor."""
        if node.op == "get_attr" and node not in self._makers:
            self._makers[node] = self._held(self._joint, node)
        return self._makers[node]

    def _result(self, node: Node | None) -> Node | _Place | None:
        maker = None if node is None else self._maker(node)
        return self._made_or_place(maker) if isinstance(maker, tuple) else maker

    def _copied(self, at: int, node: Node, inputs: Mapping[Node, Node | _Place]) -> Node:
        part = self._parts[at]
        if node.op == "get_attr":
            return self._held(part.graph, node)
        origin = part.origin(node)
        # A node that a rewrite added gets phase, line and module from its neighbours in the whole graph.
        meta = {key: value for key, value in node.meta.items() if key != "phase"}
        meta |= {} if origin is None else origin.meta
        meta["val"] = map_aggregate(node.meta.get("val"), _unshared)
        args, kwargs = map_arg((node.args, node.kwargs), inputs.__getitem__)
        name = origin.name if origin is not None and origin.target is node.target else node.name
        return self._appender.add(node.op, node.target, args, kwargs, name, meta)

    def _held(self, graph: Graph, node: Node) -> Node:
        name = f"held_{len(self._made.nodes)}"
        setattr(self._root, name, attribute_of(graph.gm, node))
        return self._appender.add("get_attr", name, (), {}, name, node.meta)


def _unshared(val: Any) -> Any:
    """The fake tensor in memory of its own: compilers look which `val`s share memory."""
    if not isinstance(val, FakeTensor) or val.is_conj() or val.is_neg():
        return val
    return fake_on(val, val.device)
