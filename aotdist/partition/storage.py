"""Which nodes share memory, and how much of it there is.

Units: bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from aotdist.partition.traits import is_view, is_wait
from aotdist.torch_seam.symbols import estimate

_SCALAR_BYTES = 8
"""What a saved Python or symbolic number is taken to cost."""


def view_base(node: Node) -> Node:
    """The node that `node` is a view of, directly or through other views; itself if it is none."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def storage_root(node: Node) -> Node:
    """The node that allocated the memory which `node`'s result lives in; waiting allocates none."""
    while is_view(node) or is_wait(node):
        node = node.all_input_nodes[0]
    return node


def value_bytes(node: Node) -> int:
    """Bytes of the node's own result; of all its results when it has several."""
    return _bytes_of(node.meta.get("val"))


def _bytes_of(value: object) -> int:
    if isinstance(value, torch.Tensor):
        return estimate(value.numel()) * value.element_size()
    if isinstance(value, (tuple, list)):
        return sum(_bytes_of(item) for item in value)
    return 0 if value is None else _SCALAR_BYTES


def storage_bytes(nodes: Iterable[Node], free: Iterable[Node]) -> int:
    """Bytes that keeping `nodes` costs: shared storage once, storage of `free` nodes not at all."""
    roots = {storage_root(node) for node in nodes} - {storage_root(node) for node in free}
    return sum(value_bytes(root) for root in roots if root.op != "get_attr")
