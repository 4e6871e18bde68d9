"""Writes into tensors whose elements share memory (expanded ones, windows), for Inductor.

Inductor lets a scatter write where its argument lies if nothing reads that later, also where one element of
it is many (torch 2.13, `torch.compile` too): of `zeros(()).expand(3).index_put(...)` every element becomes
the last one that was put. So what is written gets memory of its own first.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from aotdist.convention.memory import may_repeat
from aotdist.sizes import is_symbolic

_ATEN = torch.ops.aten
_SCATTERS = {
    _ATEN.index_put.default: False,
    _ATEN._unsafe_index_put.default: False,
    _ATEN.slice_scatter.default: True,
    _ATEN.select_scatter.default: True,
    _ATEN.diagonal_scatter.default: True,
    _ATEN.as_strided_scatter.default: True,
}
"""What Inductor lets write in place, and makes other scatters of; whether windows stay such in eager."""


def lay_out_what_is_written(gm: GraphModule) -> None:
    """Let scatters write to copies of what overlaps itself, in place."""
    for scatter, keeps_windows in _SCATTERS.items():
        for node in gm.graph.find_nodes(op="call_function", target=scatter):
            written = node.args[0]
            if isinstance(written, Node) and _overlaps(written.meta["val"], windows=not keeps_windows):
                with gm.graph.inserting_before(node):
                    copy = gm.graph.call_function(
                        _ATEN.clone.default, (written,), {"memory_format": torch.contiguous_format}
                    )
                copy.meta = {**written.meta, "val": written.meta["val"].contiguous()}
                node.update_arg(0, copy)


def _overlaps(tensor: torch.Tensor, *, windows: bool) -> bool:
    """Whether a tensor is expanded, or, if `windows` count, whether elements may share memory otherwise.

    Where sizes are symbols, they do if a stride occurs twice.
    """
    strides = [stride for stride in tensor.stride() if not is_symbolic(stride)]
    if 0 in strides or not windows:
        return 0 in strides
    if is_symbolic((*tensor.size(), *tensor.stride())):
        return len(strides) > len(set(strides))
    return may_repeat(tensor)
