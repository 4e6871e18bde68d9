"""Drops what a functional graph does not need: dead nodes, no-op copies, undone views, repeated calls.

Nothing here changes a bit of any result. A copy is dropped only when nobody can tell: not when a result lives
in its memory, nor when its source lives in an argument or a result, which the caller may write before
backward.

A deterministic operator is run once for all equal calls. A call of the backward that repeats one of the
forward stays, as its result would have to be saved; unless that is small beside its input: the scale of a
tensor in FP8 is a number, and computing it again reads the tensor again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from aotdist.partition.builder import GraphBuilder, needed_by
from aotdist.partition.traits import is_effectful, is_view, is_wait, phase_of, storage_root, value_bytes
from aotdist.program import Graph
from aotdist.settings import Settings
from aotdist.torch_seam.operators import OpOverload, cached_by_operator
from aotdist.torch_seam.symbols import surely_equal

_ATEN = torch.ops.aten

_RENAMES = frozenset({_ATEN.detach.default, _ATEN.alias.default, _ATEN.lift_fresh.default})
"""Views that show their argument unchanged."""

_COPIES = frozenset({_ATEN.clone.default, _ATEN._to_copy.default, _ATEN.lift_fresh_copy.default})
"""Copies, which are no-ops when layout, dtype and device stay."""

_NAMESPACES = frozenset({"aten", "prims"})
"""Namespaces whose operators do what their schemas say, and nothing besides."""

_CHANGEABLE = frozenset({torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape})
"""Tags of operators whose equal calls may give different values or sizes."""

_SMALL = 1024
"""A result that is this many times smaller than its input is saved rather than computed again; and so is:"""

_NUMBER = 8
"""Bytes of a number: computing one again costs a launch."""

_REARRANGED = frozenset(
    {
        _ATEN.permute.default,
        _ATEN.t.default,
        _ATEN.transpose.int,
        _ATEN.view.default,
        _ATEN._unsafe_view.default,
        _ATEN.clone.default,
    }
)
"""Operators whose result has the elements of the argument, in another order or shape."""


def cleanup(graph: Graph, settings: Settings) -> Graph:
    """The same results from fewer nodes."""
    order = [n for n in graph.gm.graph.nodes if n.op != "output"]
    stands_for = _Simplifier.of(graph).simplify(order)
    roots = [n for n in graph.results() if n is not None]
    roots += [n for n in order if n.op == "placeholder" or is_effectful(n)]
    kept = needed_by(roots, order, stands_for)
    if len(kept) == len(order):
        return graph
    builder = GraphBuilder(graph.gm)
    for node in order:
        if node.op == "placeholder":
            builder.placeholder(node)
        elif node in stands_for:
            if stands_for[node] in kept:
                builder.env[node] = builder.env[stands_for[node]]
        elif node in kept:
            builder.copy(node)
    results = [None if n is None else builder.env[n] for n in graph.results()]
    return builder.finish(results, graph.ins, graph.outs)


@dataclass(frozen=True, slots=True)
class _Simplifier:
    """Finds nodes that an earlier node can replace.

    Args:
        results: the graph's result nodes.
        result_memory: nodes that own the memory in which results live.
        returned: nodes that are results after replacement: no node may be returned twice.
        written_over: first arguments of `copy`, which takes its strides and offset from them.
        stands_for: the replacements found so far; never chained.
        first_of: by kind of call, the earlier nodes that can replace later ones: one per phase and policy.
        value_of: for a node, the first one of the same value in any phase, if that is another.
    """

    results: frozenset[Node]
    result_memory: frozenset[Node]
    returned: set[Node]
    written_over: frozenset[Node]
    stands_for: dict[Node, Node] = field(default_factory=dict)
    first_of: dict[Hashable, list[Node]] = field(default_factory=dict)
    value_of: dict[Node, Node] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> _Simplifier:
        results = frozenset(n for n in graph.results() if n is not None)
        copies = graph.gm.graph.find_nodes(op="call_function", target=_ATEN.copy.default)
        written_over = frozenset(_before_renames(copy.args[0]) for copy in copies)
        return cls(results, frozenset(storage_root(n) for n in results), set(results), written_over)

    def simplify(self, order: list[Node]) -> Mapping[Node, Node]:
        for node in order:
            earlier = self._earlier(node)
            if earlier is not None:
                self.stands_for[node] = self.stands_for.get(earlier, earlier)
                self.value_of[node] = self._value(earlier)
        return self.stands_for

    def _earlier(self, node: Node) -> Node | None:
        if node.op != "call_function":
            return None
        if node.target in _RENAMES:
            return self._shown_by(self._source(node), node)
        if node.target in _COPIES:
            return self._copied(node) or self._repeated(node)
        if node.target is _ATEN.t.default:
            return self._undone(node) or self._repeated(node)
        if is_wait(node):
            return self._waited(node)
        return self._repeated(node) if is_view(node) or _is_repeatable(node) else None

    def _waited(self, node: Node) -> Node | None:
        """The first wait for a collective: a selective checkpoint that keeps what one returns waits again."""
        first = self.first_of.setdefault(self._key(node), [node])[0]
        return None if first is node else self._shown_by(first, node)

    def _undone(self, node: Node) -> Node | None:
        """The source of a double transpose, as in the backward of each linear layer (1.2 us each)."""
        transposed = self._source(node)
        return self._shown_by(self._source(transposed), node) if transposed.target is node.target else None

    def _shown_by(self, source: Node, node: Node) -> Node | None:
        """`source`, if it can replace `node`, a view of all of it without change."""
        if node not in self.results:
            return source
        if source.op in ("placeholder", "get_attr") or source in self.returned:
            return None
        self.returned.add(source)
        return source

    def _copied(self, node: Node) -> Node | None:
        source = self._source(node)
        memory = storage_root(source)
        distinct = node in self.result_memory or memory in self.result_memory or memory.op == "placeholder"
        lies_alike = _same_layout(node, source, offset=node in self.written_over)
        return source if not distinct and lies_alike else None

    def _repeated(self, node: Node) -> Node | None:
        seen = self.first_of.setdefault(self._key(node), [])
        if seen:
            self.value_of[node] = self._value(seen[0])
        replacement = next((earlier for earlier in seen if _may_stand_for(earlier, node)), None)
        if node in self.results or node in self.result_memory:
            return None
        if replacement is None:
            seen.append(node)
        return replacement

    def _source(self, node: Node) -> Node:
        (source,) = node.all_input_nodes
        return self.stands_for.get(source, source)

    def _value(self, node: Node) -> Node:
        return self.value_of.get(node, node)

    def _key(self, node: Node) -> Hashable:
        if node.target is _ATEN.max.default:  # the same in any order of elements
            return (node.target, self._magnitudes(node.all_input_nodes[0]))
        kwargs = node.kwargs and tuple((name, self._freeze(value)) for name, value in node.kwargs.items())
        return (id(node.target), self._freeze(node.args), kwargs or ())  # PyTorch hashes operators in Python

    def _magnitudes(self, node: Node) -> Hashable:
        """Equal for tensors of the same magnitudes in any order and shape; else, the tensor."""
        if node.target is not _ATEN.abs.default:
            return self._value(node)
        (source,) = node.all_input_nodes
        while source.target in _REARRANGED:
            source = source.all_input_nodes[0]
        return (node.target, self._value(source))

    def _freeze(self, argument: Any) -> Hashable:
        kind = type(argument)
        if kind is Node:
            return self.value_of.get(argument, argument)
        if isinstance(argument, (list, tuple)):
            return tuple(map(self._freeze, argument))
        if isinstance(argument, (float, complex)):
            return (kind, repr(argument))  # zeros of either sign are equal, and are not the same
        return (kind, argument)


def _is_repeatable(node: Node) -> bool:
    """Whether the node computes a new tensor, which depends on its arguments alone."""
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return is_tensor and _op_is_repeatable(node.target) and not is_effectful(node)


@cached_by_operator
def _op_is_repeatable(op: Any) -> bool:
    if not isinstance(op, OpOverload) or op.namespace not in _NAMESPACES:
        return False
    return _CHANGEABLE.isdisjoint(op.tags)


def _may_stand_for(earlier: Node, node: Node) -> bool:
    """Whether a node can replace a later one of equal value: within a phase, or if saving it is cheaper."""
    labels, own = ((phase_of(n), n.meta.get("policy")) for n in (earlier, node))
    if labels == own:
        return True
    crosses = labels == ("forward", None) and own == ("backward", None)
    made_from = max(map(value_bytes, node.all_input_nodes), default=0)
    return crosses and made_from > 0 and value_bytes(node) <= max(_NUMBER, made_from // _SMALL)


def _before_renames(node: Node) -> Node:
    while node.target in _RENAMES:
        (node,) = node.all_input_nodes
    return node


def _same_layout(node: Node, source: Node, *, offset: bool) -> bool:
    a, b = node.meta.get("val"), source.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    same = (a.dtype, a.device) == (b.dtype, b.device)
    same = same and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())  # a copy resolves these bits
    same = same and surely_equal((*a.shape, *a.stride()), (*b.shape, *b.stride()))
    same = same and (not offset or surely_equal([a.storage_offset()], [b.storage_offset()]))
    return same and not node.kwargs.get("pin_memory")
