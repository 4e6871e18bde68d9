"""The default policy: keep eager's schedule, save what eager saves.

Nodes recorded during the forward run in the forward, the others in the backward, and every forward
value that a backward node reads is saved, except that

- a view is made again from its base, which costs nothing;
- a value tagged `must_recompute` is made again, and so is every view of it, unless it is drawn at
  random or a view of it is tagged `must_save`.
"""

from __future__ import annotations

from typing import Literal, assert_never

from torch.fx import Node

from aotdist.partition.builder import collector_paused
from aotdist.partition.halves import Halves, find_halves
from aotdist.partition.split import split
from aotdist.partition.traits import is_size, is_view
from aotdist.program import Graph, Split


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
            stack.extend(node.all_input_nodes)
        else:
            saved.add(node)
    return saved


# `partition`: cuts a joint graph by the named policy.

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
            from aotdist.partition.min_cut import min_cut_saved  # scipy: 0.2 s to import, on demand

            return min_cut_saved(halves)
        case _:
            assert_never(policy)
