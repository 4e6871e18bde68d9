"""Says whose index is out of bounds where a C++ kernel of Inductor's knows its own variables only."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.fx import Node

from aotdist.errors import IndexOutOfBounds
from aotdist.program import Graph
from aotdist.torch_seam.operators import OpOverload, argument_names

_FAILED = re.compile(r"index out of bounds: .* < (\d*)")
_INDICES = frozenset({"index", "indices", "target"})
"""Names of the arguments by which PyTorch's operators pick elements."""


def lines_with_indices(graph: Graph) -> tuple[str, ...]:
    """The lines of the user's program whose operators pick elements by tensors."""
    lines = (node.meta.get("source") for node in graph.gm.graph.nodes if _takes_indices(node))
    return tuple(dict.fromkeys(line for line in lines if line))


def _takes_indices(node: Node) -> bool:
    op = node.target
    return isinstance(op, OpOverload) and not _INDICES.isdisjoint(argument_names(op))


def raise_if_of_an_index(error: RuntimeError, lines: Sequence[str], name: str) -> None:
    """Raise what says more, if that is what a kernel failed for.

    Args:
        error: what running a graph raised.
        lines: those of the program that pick elements in this graph.
        name: of the graph.

    Raises:
        IndexOutOfBounds: an index is not one of the dimension.
    """
    found = None if isinstance(error, IndexOutOfBounds) else _FAILED.search(str(error))
    if found is None:
        return
    size = f" of {found[1]} elements" if found[1] else ""
    raise IndexOutOfBounds(
        f"an index, or a label, is out of bounds for a dimension{size} in `{name}`",
        where="\n     ".join(lines) or None,
        stage="runtime",
        fix='correct the data; with backend="fx" the message names the index, as in eager',
    ) from error
