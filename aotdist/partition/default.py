"""The default policy: keep eager's schedule, save what eager saves.

Nodes recorded during the forward run in the forward, the others in the backward, and every forward
value that a backward node reads is saved, except that

- a view is made again from its base, which costs nothing;
- a value tagged `must_recompute` is made again, and so is every view of it, unless it is drawn at
  random or a view of it is tagged `must_save`.
"""

from __future__ import annotations

from torch.fx import Node

from aotdist.partition.halves import Halves
from aotdist.partition.traits import is_size, is_view


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
