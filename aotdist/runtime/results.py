"""Results of a forward graph that are views of its temporaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from aotdist.partition.traits import is_view
from aotdist.program import Graph


def result_views(graph: Graph) -> frozenset[int]:
    """Positions of the results that a graph makes as views of temporaries of its own.

    They must be detached. What was a tensor of its own in the user's program, written in place and then
    functionalised, must not be known to autograd as a view that was made inside of a node. And a compiler
    may have dropped a view that changes nothing, so that one tensor is two results: a node would return
    both as differentiable, or neither. What lies in a wrapper is not returned itself: there it may be the
    same tensor twice, as offsets of jagged tensors are.
    """
    first: dict[Node | None, int] = {}
    return frozenset(
        position
        for position, (slot, node) in enumerate(zip(graph.outs, graph.results(), strict=True))
        if node is not None
        and (is_view(node) or (not slot.inner and first.setdefault(node, position) != position))
    )


def detached_views(results: Sequence[Any], views: frozenset[int]) -> list[Any]:
    """`results` with those at `views` detached, which keeps memory and version counter."""
    return [value.detach() if position in views else value for position, value in enumerate(results)]
