"""Policies: which values of the forward are saved for the backward, and which it computes again.

The default keeps eager's schedule and saves what eager saves. Nodes recorded during the forward run in the
forward, the others in the backward, and every forward value that a backward node reads is saved, except that

- a view is made again from its base, which costs nothing;
- a value tagged `must_recompute` is made again, and so is every view of it, unless it is drawn at
  random or a view of it is tagged `must_save`.
"""

from __future__ import annotations

from typing import Literal, assert_never

import torch
from torch.fx import Node

from aotdist.partition.builder import collector_paused
from aotdist.partition.halves import Halves, find_halves, must_recompute_of, must_save_of
from aotdist.partition.split import split
from aotdist.partition.traits import is_effectful, is_getitem, is_size, is_view, is_wait, phase_of
from aotdist.program import Graph, Split
from aotdist.torch_seam.nodes import inputs_of
from aotdist.torch_seam.symbols import SYMBOLIC


def default_saved(halves: Halves) -> set[Node]:
    """The forward values and primals that eager's schedule hands to the backward."""
    saved: set[Node] = set()
    seen: set[Node] = set()
    stack = halves.boundary()
    while stack:
        node = stack.pop()
        if node in seen or node.op == "get_attr" or is_size(node):
            continue
        seen.add(node)
        if is_view(node) or node in halves.must_recompute:
            stack.extend(inputs_of(node))
        else:
            saved.add(node)
    return saved


Policy = Literal["default", "min_cut"]


def partition(joint: Graph, policy: Policy) -> Split:
    """The forward and the backward graph of a joint graph.

    Args:
        joint: placeholders in the order of `Recorder.graph`; nodes carry `val`, `phase` and maybe `policy`.
        policy: `default` saves what eager saves, `min_cut` saves the fewest bytes and recomputes
            cheap operations in the backward.

    Raises:
        InternalError: the joint graph cannot be cut (a forward result depends on a tangent).
    """
    with collector_paused():
        halves = find_halves(joint)
        return split(halves, _choose(halves, policy))


def _choose(halves: Halves, policy: Policy) -> set[Node]:
    match policy:
        case "default":
            return default_saved(halves)
        case "min_cut":
            from aotdist.partition.min_cut import min_cut_saved  # which reads this module

            return min_cut_saved(halves)
        case _:
            assert_never(policy)


# A program with a backward inside of it: a whole step is one graph.
#
# The values of the forward that its backward reads are alive in between. So the min-cut policy chooses them
# as it does for two halves, and what follows from them at little cost is computed again right before the
# backward reads it.


def remade(graph: Graph) -> Graph:
    """`graph` with cheap operations of its forward repeated in its backward; itself if it has no backward."""
    if not any(phase_of(node) == "backward" for node in graph.gm.graph.nodes):
        return graph
    graph = graph.copied()
    halves = _own_halves(graph)
    saved = _choose(halves, "min_cut")
    needed = graph.ancestors(halves.backward, stop=saved) - halves.late - saved
    recomputed = {node for node in needed if node.op == "call_function" and not is_effectful(node)}
    copies: dict[Node, Node] = {}
    for reader in halves.backward:
        for node in recomputed.intersection(reader.all_input_nodes):
            _make_again(node, reader, recomputed, copies)
            reader.replace_input_with(node, copies[node])
    return graph


def _make_again(node: Node, reader: Node, recomputed: set[Node], copies: dict[Node, Node]) -> None:
    """Copy `node`, and the recomputed nodes that it needs, ahead of `reader`."""
    pending = [node]
    while pending:
        more = [each for each in pending[-1].all_input_nodes if each in recomputed and each not in copies]
        if more:
            pending += more
            continue
        made = pending.pop()
        if made not in copies:
            with made.graph.inserting_before(reader):
                copies[made] = made.graph.node_copy(made, lambda each: copies.get(each, each))
            copies[made].meta["function"] = reader.meta.get("function", "")


def _own_halves(graph: Graph) -> Halves:
    """The program's own backward, without the updates that follow, and what does not depend on it."""
    order = tuple(node for node in graph.gm.graph.nodes if node.op != "output")
    late: set[Node] = set()
    for node in order:
        of_backward = phase_of(node) == "backward" and not (is_getitem(node) or is_wait(node))
        needs_late = any(each in late for each in node.all_input_nodes)
        if node.op == "call_function" and (of_backward or needs_late or _is_number(node)):
            late.add(node)
    must_save = must_save_of(order)
    return Halves(
        joint=graph,
        order=order,
        late=frozenset(late),
        backward=tuple(node for node in order if node in late and phase_of(node) == "backward"),
        forward_roots=(),
        backward_roots=(),
        written=frozenset(),
        rng=frozenset(),
        must_save=must_save,
        must_recompute=must_recompute_of(order, never=must_save | {n for n in order if is_effectful(n)}),
    )


def _is_number(node: Node) -> bool:
    """Whether a node is a number of Python's, which is alive anyway: a rate, or what follows from a count."""
    return not isinstance(node.meta.get("val"), (torch.Tensor, list, tuple, *SYMBOLIC))
