"""What must hold of a graph after every pass, as a list of named checks.

A broken invariant is a bug of ours: the error gives the node, its ten neighbours either side and
the user's line that it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch.fx import Node

from aotdist.errors import InternalError
from aotdist.partition.traits import is_collective, is_copy_back, is_wait
from aotdist.program import Graph, Split
from aotdist.torch_seam.nodes import inputs_of
from aotdist.torch_seam.operators import OpOverload, writes_arguments

_NEIGHBOURS = 10

Fault = tuple[Node, str]
"""The node to point at, and what is wrong with it."""


def _flat_results(graph: Graph) -> Iterator[Fault]:
    output = graph.gm.graph.output_node()
    values = output.args[0]
    if not isinstance(values, (tuple, list)):
        yield output, "returns one value, not a flat tuple"
        return
    if len(values) != len(graph.outs):
        yield output, f"returns {len(values)} values for {len(graph.outs)} slots"
    for value, slot in zip(values, graph.outs, strict=False):
        if value is not None and not isinstance(value, Node):
            yield output, f"returns {type(value).__name__} for {slot.role} `{slot}`"


def _named_arguments(graph: Graph) -> Iterator[Fault]:
    nodes = list(graph.gm.graph.nodes)
    arguments = [n for n in nodes if n.op == "placeholder"]
    if len(arguments) != len(graph.ins):
        yield nodes[0], f"the graph takes {len(arguments)} arguments for {len(graph.ins)} slots"
    if len(set(graph.ins)) != len(graph.ins):
        yield nodes[0], "two arguments have the same slot"
    for node in nodes[len(arguments) :]:
        if node.op == "placeholder":
            yield node, "is an argument behind an operation"


def _no_mutation(graph: Graph) -> Iterator[Fault]:
    for node in graph.calls(_writes):
        if not is_copy_back(node):
            yield node, "writes to its argument"
        elif node.next.op != "output" and not is_copy_back(node.next):
            yield node, "copies into an argument before the end of the graph"


def _writes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and writes_arguments(node.target)


def _values_known(graph: Graph) -> Iterator[Fault]:
    for node in graph.gm.graph.nodes:
        if node.op in ("placeholder", "call_function") and "val" not in node.meta:
            yield node, "has no `val`"


def _in_order(graph: Graph) -> Iterator[Fault]:
    seen: set[Node] = set()
    for node in graph.gm.graph.nodes:
        for source in inputs_of(node):
            if source not in seen:
                yield node, f"uses `{source.name}` before it is computed"
        seen.add(node)


def _waited_once(graph: Graph) -> Iterator[Fault]:
    for node in graph.calls(is_collective):
        started = node.users if isinstance(node.meta.get("val"), (list, tuple)) else [node]
        for result in started:
            waits = sum(is_wait(user) for user in result.users)
            if waits != 1 or len(result.users) != 1:
                yield node, f"is waited for {waits} times and used by {len(result.users)} nodes"


INVARIANTS: Mapping[str, Callable[[Graph], Iterator[Fault]]] = {
    "results are one flat tuple with a slot each": _flat_results,
    "arguments come first, with a slot each": _named_arguments,
    "nothing is mutated, but arguments by `copy_` at the very end": _no_mutation,
    "every value's shape is known": _values_known,
    "values are computed before they are used": _in_order,
    "every collective is waited for once, and used only through its wait": _waited_once,
}
"""What must hold of a graph, in words, and what finds where it does not."""


def verify(graph: Graph, after: str) -> None:
    """Checks every invariant.

    Args:
        after: what produced the graph, for the message.

    Raises:
        InternalError: the first fault found.
    """
    for invariant, faults in INVARIANTS.items():
        for node, fault in faults(graph):
            raise _error(node, fault, invariant, after)


def verify_split(split: Split) -> None:
    """Checks that the two halves agree on what is handed over, and in which order.

    Raises:
        InternalError: they do not.
    """
    returned = tuple(slot for slot in split.forward.outs if slot.role == "saved")
    computed = split.saved[len(split.saved_primals) :]
    taken = split.backward.ins[: len(split.saved)]
    if returned != computed:
        raise _split_error(f"the forward saves {_names(returned)}, the split {_names(computed)}")
    if taken != split.saved:
        raise _split_error(f"the backward takes {_names(taken)}, not {_names(split.saved)}")
    missing = set(split.saved_primals.values()) - set(split.forward.ins)
    if missing:
        raise _split_error(f"saved primals {_names(tuple(missing))} are no arguments of the forward")


def _split_error(fault: str) -> InternalError:
    return InternalError(fault, stage="partition", fix="report this with the graph's printed code")


def _names(slots: tuple[object, ...]) -> str:
    return ", ".join(str(slot) for slot in slots) or "nothing"


def _error(node: Node, fault: str, invariant: str, after: str) -> InternalError:
    return InternalError(
        f"`{node.name}` {fault} (after {after}; broken: {invariant})\n{_surroundings(node)}",
        where=node.meta.get("source"),
        stage="verify",
        fix="report this with the listing above; `settings.disabled_passes` may get you past it",
    )


def _surroundings(node: Node) -> str:
    nodes = list(node.graph.nodes)
    at = nodes.index(node)
    listed = nodes[max(at - _NEIGHBOURS, 0) : at + _NEIGHBOURS + 1]
    shown = ((n, n.format_node() or f"{n.op} {n.name}") for n in listed)
    return "\n".join(f"  {'->' if n is node else '  '} {text}" for n, text in shown)
