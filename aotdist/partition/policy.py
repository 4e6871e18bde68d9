"""`partition`: cuts a joint graph by the named policy."""

from __future__ import annotations

from typing import Literal, assert_never

from torch.fx import Node

from aotdist.partition.collector import collector_paused
from aotdist.partition.default import default_saved
from aotdist.partition.halves import Halves, find_halves
from aotdist.partition.split import split
from aotdist.program import Graph, Split

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
