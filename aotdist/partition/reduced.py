"""The backward for when only some outputs are differentiated.

A backward is linear in its tangents. So with some tangents absent, a value that depends on these alone is
zero: it is not computed, a sum with it is the other summand, and a gradient that is zero is absent, as in
eager. Zeros are made only where an operation mixes them with other values. (Zeros for absent tangents instead
would turn -0.0 into 0.0, give NaN where the derivative is infinite, and cost as much as if all tangents were
given.)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch.fx import Node

from aotdist.partition.builder import GraphBuilder
from aotdist.partition.traits import is_effectful
from aotdist.program import GRADIENT_ROLES, Graph, Slot
from aotdist.torch_seam.symbols import surely_equal

_ADD = torch.ops.aten.add.Tensor


def without_tangents(backward: Graph, missing: Collection[Slot], *, any_strides: bool) -> Graph:
    """The backward that takes all but the `missing` tangents; results that are zero then are None.

    Args:
        backward: the graph.
        missing: arguments that are left out.
        any_strides: whether its values may have other strides than their `val`s.
    """
    zero = _zeros(backward, missing)
    results = [None if node in zero else node for node in backward.results()]
    order = [node for node in backward.gm.graph.nodes if node.op != "output"]
    stands_for = _summands(order, zero, any_strides=any_strides)
    needed = _needed(order, results, zero, stands_for)
    builder = GraphBuilder(backward.gm)
    for node in order:
        if node.op == "placeholder":
            if node not in zero:
                builder.placeholder(node)
        elif node in stands_for:
            if stands_for[node] in builder.env:
                builder.env[node] = builder.env[stands_for[node]]
        elif node in needed:
            _make_zeros(builder, node, zero)
            builder.copy(node)
    ins = [slot for slot in backward.ins if slot not in missing]
    return builder.finish([None if n is None else builder.env[n] for n in results], ins, backward.outs)


def _zeros(backward: Graph, missing: Collection[Slot]) -> set[Node]:
    """Nodes that depend on missing tangents and on no other."""
    tangents = {
        node: slot for slot, node in backward.named_placeholders().items() if slot.role in GRADIENT_ROLES
    }
    depends: dict[Node, bool] = {}
    """Of nodes that depend on tangents: whether on one that is not missing."""
    for node in backward.gm.graph.nodes:
        if node in tangents:
            depends[node] = tangents[node] not in missing
        elif node.op != "output" and any(i in depends for i in node.all_input_nodes):
            # A summand that depends on no tangent (`zeros_like(self)` of a formula) counts, as in eager.
            counts = node.target is _ADD
            depends[node] = any(depends.get(i, counts) for i in node.all_input_nodes)
    return {node for node, is_given in depends.items() if not is_given}


def _summands(order: list[Node], zero: set[Node], *, any_strides: bool) -> Mapping[Node, Node]:
    """Sums of which one summand is zero, with the other; never chained."""
    replaced: dict[Node, Node] = {}
    for node in order:
        if node.target is _ADD and node not in zero and not node.kwargs:
            for summand, other in (node.args, reversed(node.args)):
                if summand in zero and isinstance(other, Node) and _interchangeable(node, other, any_strides):
                    replaced[node] = replaced.get(other, other)
    return replaced


def _interchangeable(a: Node, b: Node, any_strides: bool) -> bool:
    first, second = a.meta["val"], b.meta["val"]
    if first.dtype != second.dtype or not surely_equal(first.size(), second.size()):
        return False
    return any_strides or surely_equal(first.stride(), second.stride())


def _needed(
    order: list[Node], results: list[Node | None], zero: set[Node], stands_for: Mapping[Node, Node]
) -> set[Node]:
    """Nodes that are left to compute."""
    roots = [node for node in results if node is not None]
    roots += [node for node in order if is_effectful(node) and node not in zero]
    wanted = {stands_for.get(node, node) for node in roots}
    for node in reversed(order):
        if node in wanted and node not in zero:
            wanted.update(stands_for.get(i, i) for i in node.all_input_nodes if i not in zero)
    return wanted


def _make_zeros(builder: GraphBuilder, node: Node, zero: set[Node]) -> None:
    """Zeros for the inputs of `node` that are zero, each made once."""
    for source in node.all_input_nodes:
        if source in zero and source not in builder.env:
            value: torch.Tensor = source.meta["val"]
            val = value.new_empty(value.size())
            made = builder.call(
                torch.ops.aten.full.default,
                ([builder.number(size) for size in value.size()], 0),
                like=source,
                name=f"{source.name}_zero",
                val=val,
            )
            made.kwargs = {"dtype": value.dtype, "device": value.device}
            builder.env[source] = made
