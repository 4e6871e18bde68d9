"""Whether two traces are of one program: one with symbols and one with numbers, or one after the other."""

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
    """Whether a trace with symbols is of the program of one with numbers, and computes as Python does."""
    return (
        _is_exact(symbolic)
        and not symbolic.symbols.decides_by(symbolic.symbols.floats())
        and _have_same_constants(symbolic, numbers)
        and _have_same_operations(symbolic.graph, numbers.graph)
    )


def _is_exact(traced: Traced) -> bool:
    """Whether all symbolic numbers are computed as Python computes them."""
    taken = [node.meta["val"] for node in traced.graph.named_sizes().values()]
    said = pytree.tree_leaves([_results(traced), list(_assigned(traced.facts).values())])
    return all(computes_exactly(number) for number in (*taken, *said) if isinstance(number, SYMBOLIC))


def _have_same_constants(symbolic: Traced, traced: Traced) -> bool:
    """Whether results and assignments that are no tensors are the same, but for symbols."""
    ours, theirs = _assigned(symbolic.facts), _assigned(traced.facts)
    results, other_results = _results(symbolic), _results(traced)
    carried, other_carried = _carried(symbolic.graph), _carried(traced.graph)
    if len(results) != len(other_results):
        return False
    pairs = list(zip(results, other_results, strict=True))
    # What is assigned the number that it holds anyway shows as an assignment with symbols only.
    pairs += [(ours[place], theirs[place]) for place in ours.keys() & theirs.keys()]
    if theirs.keys() - ours.keys():
        return False
    for one, other in pairs:
        (leaves, spec), (other_leaves, other_spec) = map(pytree.tree_flatten, (one, other))
        if spec != other_spec:
            return False
        pairs_of_leaves = zip(leaves, other_leaves, strict=True)
        numbers = [(a, b) for a, b in pairs_of_leaves if is_constant(b) or isinstance(b, SYMBOLIC)]
        if not all(_is_hinted(_told(a, carried), _told(b, other_carried)) for a, b in numbers):
            return False
    return True


def _results(traced: Traced) -> list[Any]:
    """Results that are no tensors; a number that a tensor carries outside is one of them."""
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
    """Numbers that results carry outside, by the names of the results, as they are in this call."""
    results = {slot.path: node for slot, node in graph.named_results().items() if slot.role == "output"}
    return {name: _known(node) for name, node in results.items() if node is not None and _is_known(node)}


def _told(number: Any, carried: Mapping[str, Any]) -> Any:
    """A number, or what it is in this call if a result carries it."""
    return carried.get(str(number), number) if isinstance(number, SYMBOLIC) else number


def _is_known(node: Node) -> bool:
    """Whether what a number is in this call is known, or what a tensor holds that carries it."""
    return KNOWN in node.meta or (node.target in _OF_CARRIED and _is_known(node.all_input_nodes[0]))


def _known(node: Node) -> Any:
    return node.meta[KNOWN] if KNOWN in node.meta else _known(node.all_input_nodes[0])


_OF_CARRIED = (torch.ops.aten.clone.default, torch.ops.aten._local_scalar_dense.default)


def _assigned(facts: Facts) -> dict[tuple[int, Any], Any]:
    """What places are assigned, by where they are."""
    return {place.spot(): value for place, value in Returned.of(facts).constants()}


def _have_same_operations(symbolic: Graph, graph: Graph) -> bool:
    """Whether two graphs have the same operations: a program may ask whether a number is an `int`."""
    ours, theirs = _operations(symbolic), _operations(graph)
    return len(ours) == len(theirs) and all(
        target == other and len(args) == len(others) and all(map(_is_hinted, args, others))
        for (target, args), (other, others) in zip(ours, theirs, strict=True)
    )


def _operations(graph: Graph) -> list[tuple[Any, list[Any]]]:
    """What each node calls, and with what: results of nodes are named by position, numbers by value."""
    told: dict[Node, Any] = {node: node.meta["val"] for node in graph.named_sizes().values()}
    found: list[tuple[Any, list[Any]]] = []
    for node in graph.gm.graph.nodes:
        if _is_known(node):
            told[node] = _known(node)
        elif _keeps_all(node):
            told[node] = told[node.args[0]]
        elif not node.users and getattr(node.target, "is_view", False):
            continue
        elif node not in told:
            told[node] = f"operation {len(found)}"
            args = pytree.tree_leaves((node.args, node.kwargs))
            args = [told[arg] if isinstance(arg, Node) else arg for arg in args]
            if node.op == "output":  # numbers that are kept are compared as what they are
                args = [arg for arg in args if arg is None or isinstance(arg, str)]
            found.append((node.target if node.op in ("call_function", "get_attr") else node.op, args))
    return found


def _keeps_all(node: Node) -> bool:
    """Whether a node is its argument, at the sizes at hand: traces with numbers leave some of these out."""
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
    """Whether `known`, a constant or computed of sizes, is what the symbolic number is in this call."""
    known = hint(known) if isinstance(known, SYMBOLIC) else known
    return is_constant(known) and same_constant(hint(symbolic), known)


def is_same_program(one: Traced, other: Traced) -> bool:
    """Whether two traces are of one program, but for the constants that it assigns."""
    same_inputs = one.program.ins == other.program.ins
    same_facts = without_returned(one.facts) == without_returned(other.facts)
    same_facts &= Returned.of(one.facts).log.prints() == Returned.of(other.facts).log.prints()
    graphs = [print_graph(traced.graph).source for traced in (one, other)]
    same_graphs = graphs[0] == graphs[1] and are_same(one.graph.held(), other.graph.held())
    return same_inputs and same_facts and same_graphs


def without_returned(facts: Facts) -> Facts:
    """`facts` without the output that says what is assigned."""
    outputs = (f for f in facts.outputs if not (isinstance(f, NotATensor) and isinstance(f.value, Returned)))
    return replace(facts, outputs=Row(outputs))


def are_same(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two graphs hold the same tensors, or equal ones."""
    return len(ones) == len(others) and all(
        one is other
        or (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and _are_equal(one, other))
        for one, other in zip(ones, others, strict=True)
    )


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return is_real(one) and is_real(other) and torch.equal(one, other)
