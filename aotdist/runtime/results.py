"""Results of a forward graph that are views of temporaries of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotdist.partition.traits import is_view
from aotdist.program import Graph


def result_views(graph: Graph) -> frozenset[int]:
    """Positions of the results that a graph makes as views of temporaries of its own.

    They must be detached: what was a tensor of its own in the user's program, written in place and then
    functionalised, may not be known to autograd as a view made inside of a node.
    """
    return frozenset(
        position for position, node in enumerate(graph.results()) if node is not None and is_view(node)
    )


def detached_views(results: Sequence[Any], views: frozenset[int]) -> list[Any]:
    """`results` with those at `views` detached, which keeps memory and version counter."""
    return [value.detach() if position in views else value for position, value in enumerate(results)]
