"""Compares two traces of a program: one with symbols and one with numbers, or traces of successive calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from aotdist.capture.captured import Returned
from aotdist.capture.constants import is_constant, same_constant
from aotdist.codegen.fx import print_graph
from aotdist.facts import Facts, Fresh, NotATensor
from aotdist.program import Graph, Row
from aotdist.subclasses.protocol import is_real
from aotdist.torch_seam.symbols import SYMBOLIC, computes_exactly, hint
from aotdist.torch_seam.trees import pytree
from aotdist.trace.numbers.scalars import KNOWN
from aotdist.trace.trace import Traced


def is_same_with_symbols(symbolic: Traced, numbers: Traced) -> bool:
    """Whether a trace with symbols and one with numbers are of one program, and compute the same."""
    return (
        _is_exact(symbolic)
        and not symbolic.symbols.decides_by(symbolic.symbols.floats())
        and _have_same_constants(symbolic, numbers)
        and _have_same_operations(symbolic.graph, numbers.graph)
    )


def _is_exact(traced: Traced) -> bool:
    """Whether all symbolic numbers are computed as Python computes them."""
    sizes = [node.meta["val"] for node in traced.graph.named_sizes().values()]
    results = pytree.tree_leaves([_results(traced), list(_assigned(traced.facts).values())])
    return all(computes_exactly(number) for number in (*sizes, *results) if isinstance(number, SYMBOLIC))


def _have_same_constants(symbolic: Traced, traced: Traced) -> bool:
    """Whether results and assignments that are no tensors are the same, up to symbols."""
    ours, theirs = _assigned(symbolic.facts), _assigned(traced.facts)
    results, other_results = _results(symbolic), _results(traced)
    carried, other_carried = _carried(symbolic.graph), _carried(traced.graph)
    if len(results) != len(other_results):
        return False
    pairs = list(zip(results, other_results, strict=True))
    # Assigning a place the number that it holds already is an assignment with symbols only.
    pairs += [(ours[place], theirs[place]) for place in ours.keys() & theirs.keys()]
    if theirs.keys() - ours.keys():
        return False
    for one, other in pairs:
        (leaves, spec), (other_leaves, other_spec) = map(pytree.tree_flatten, (one, other))
        if spec != other_spec:
            return False
        pairs_of_leaves = zip(leaves, other_leaves, strict=True)
        numbers = [(a, b) for a, b in pairs_of_leaves if is_constant(b) or isinstance(b, SYMBOLIC)]
        if not all(_is_hinted(_value(a, carried), _value(b, other_carried)) for a, b in numbers):
            return False
    return True


def _results(traced: Traced) -> list[Any]:
    """The results that are no tensors, with numbers that are returned as tensors (see `_carried`)."""
    facts, found, carried = traced.facts, list[Any](), _carried(traced.graph)
    for fact in facts.outputs:
        match fact:
            case NotATensor(value=value):
                found.append(value)
            case Fresh(value=idx) if (name := facts.node_outs[idx].slot.path) in carried:
                found.append(carried[name])
            case _:
                continue
    return found


def _carried(graph: Graph) -> dict[str, Any]:
    """The values, in this call, of numbers that the graph returns as tensors, by the name of the result."""
    results = {slot.path: node for slot, node in graph.named_results().items() if slot.role == "output"}
    return {name: _known(node) for name, node in results.items() if node is not None and _is_known(node)}


def _value(number: Any, carried: Mapping[str, Any]) -> Any:
    """The value in this call of a number that the graph returns as a tensor; other numbers as they are."""
    return carried.get(str(number), number) if isinstance(number, SYMBOLIC) else number


def _is_known(node: Node) -> bool:
    """Whether a node is a number, or a tensor that holds one, whose value in this call is known."""
    return KNOWN in node.meta or (node.target in _OF_CARRIED and _is_known(node.all_input_nodes[0]))


def _known(node: Node) -> Any:
    return node.meta[KNOWN] if KNOWN in node.meta else _known(node.all_input_nodes[0])


_OF_CARRIED = (torch.ops.aten.clone.default, torch.ops.aten._local_scalar_dense.default)


def _assigned(facts: Facts) -> dict[tuple[int, Any], Any]:
    """The constants that are assigned, by place."""
    return {place.spot(): value for place, value in Returned.of(facts).constants()}


def _have_same_operations(symbolic: Graph, graph: Graph) -> bool:
    """Whether two graphs have the same operations: a program may ask whether a number is an `int`."""
    ours, theirs = _operations(symbolic), _operations(graph)
    return len(ours) == len(theirs) and all(
        target == other and len(args) == len(others) and all(map(_is_hinted, args, others))
        for (target, args), (other, others) in zip(ours, theirs, strict=True)
    )


def _operations(graph: Graph) -> list[tuple[Any, list[Any]]]:
    """Target and arguments of each node, with results of nodes named by position, and numbers by value."""
    names: dict[Node, Any] = {node: node.meta["val"] for node in graph.named_sizes().values()}
    found: list[tuple[Any, list[Any]]] = []
    for node in graph.gm.graph.nodes:
        if _is_known(node):
            names[node] = _known(node)
        elif _keeps_all(node):
            names[node] = names[node.args[0]]
        elif not node.users and getattr(node.target, "is_view", False):
            continue
        elif node not in names:
            names[node] = f"operation {len(found)}"
            args = pytree.tree_leaves((node.args, node.kwargs))
            args = [names[arg] if isinstance(arg, Node) else arg for arg in args]
            if node.op == "output":  # numbers among the results are compared as constants
                args = [arg for arg in args if arg is None or isinstance(arg, str)]
            found.append((node.target if node.op in ("call_function", "get_attr") else node.op, args))
    return found


def _keeps_all(node: Node) -> bool:
    """Whether a node returns its whole argument at the sizes of this call; traces with numbers omit some."""
    if node.target not in _OF_SLICES:
        return False
    sizes = [[hint(size) for size in each.meta["val"].size()] for each in (node, node.all_input_nodes[0])]
    return sizes[0] == sizes[1]


_OF_SLICES = (
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.slice_backward.default,
    torch.ops.aten.alias.default,
)


def _is_hinted(symbolic: Any, known: Any) -> bool:
    """Whether the symbolic number has the value `known`, a constant or another symbol, in this call."""
    known = hint(known) if isinstance(known, SYMBOLIC) else known
    return is_constant(known) and same_constant(hint(symbolic), known)


def is_same_program(one: Traced, other: Traced) -> bool:
    """Whether two traces are of one program, up to the constants that it assigns."""
    same_inputs = one.program.ins == other.program.ins
    same_facts = without_returned(one.facts) == without_returned(other.facts)
    same_facts &= Returned.of(one.facts).log.prints() == Returned.of(other.facts).log.prints()
    graphs = [print_graph(traced.graph, flat=True).source for traced in (one, other)]
    same_graphs = graphs[0] == graphs[1] and are_same(one.graph.held(), other.graph.held())
    return same_inputs and same_facts and same_graphs


def without_returned(facts: Facts) -> Facts:
    """`facts` without the output that holds the structure of the results and the assignments."""
    outputs = (f for f in facts.outputs if not (isinstance(f, NotATensor) and isinstance(f.value, Returned)))
    return replace(facts, outputs=Row(outputs))


def are_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists of attributes of graphs hold the same objects, or equal tensors."""
    return len(ones) == len(others) and all(
        one is other
        or (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and _are_equal(one, other))
        for one, other in zip(ones, others, strict=True)
    )


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return is_real(one) and is_real(other) and torch.equal(one, other)
