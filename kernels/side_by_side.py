"""Copies of tensors that many rows read across memory, so that neighbours lie side by side.

The bias of T5's attention is looked up by position, and its heads lie side by side: a kernel that adds it to
scores, by sample, uses 4 of every 32 bytes that it reads. On an H200 that took 1.8 ms, seven times what a
copy takes. A copy goes through it by tiles, once; `aotdist.kernels.uses` keeps readers from computing it
themselves.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.fx import Node

from aotdist.kernels.rule import Pointwise, val_of
from aotdist.kernels.rules import rule_of
from aotdist.kernels.splitting import call_like, empty_like
from aotdist.kernels.uses import num_elements
from aotdist.torch_seam.symbols import estimate

MIN_ELEMENTS = 2**15
"""Fewer stay in the caches."""
MIN_ROW = 16
"""Elements of a row, at least."""


def bring_side_by_side(graph: fx.Graph) -> None:
    """Put copies before elementwise operators, in place.

    Args:
        graph: of a private copy, functional; nodes carry `val`.
    """
    copies: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if not isinstance(rule_of(node), Pointwise):
            continue
        for read in node.all_input_nodes:
            if _is_read_across(node, read):
                if read not in copies:
                    with graph.inserting_after(read):
                        made = empty_like(val_of(read), val_of(read).shape)
                        copies[read] = call_like(graph, read, torch.ops.aten.clone.default, (read,), made)
                node.replace_input_with(read, copies[read])


def _is_read_across(node: Node, read: Node) -> bool:
    """Whether a row of the result reads with a stride above 1 what other rows read again."""
    own, other = val_of(node), val_of(read)
    if not all(isinstance(val, torch.Tensor) and val.dim() for val in (own, other)):
        return False
    is_row = estimate(own.stride(-1)) == 1 and MIN_ROW <= estimate(own.shape[-1]) == estimate(other.shape[-1])
    steps = [estimate(stride) for stride in other.stride()]
    is_much = MIN_ELEMENTS <= num_elements(read) < num_elements(node)
    return is_row and is_much and steps[-1] > 1 and 1 in steps
