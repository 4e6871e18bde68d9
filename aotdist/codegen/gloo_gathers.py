"""Gathers into a buffer of the graph's own, where gloo gathers.

On gloo, `all_gather_into_tensor` is a coalesced gather, which corrupts the heap once two are in flight: on
torch 2.11 and 2.13, ranks that start two and then wait for both abort within some thousand rounds. Its `out`
form is a plain gather, and is sound. We start gathers ahead, so every compiler is given that form.

Inductor knows that a gather reads its input until it has been waited for, but not of the `out` form: it lets
a kernel that runs meanwhile write there. So the input has another use behind the wait.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from aotdist.partition.traits import is_wait, view_base
from aotdist.passes.collectives import group_name
from aotdist.program import Graph
from aotdist.torch_seam.groups import runs_on_gloo
from aotdist.torch_seam.symbols import spell_number

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_GATHER_INTO = torch.ops._c10d_functional.all_gather_into_tensor_out.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_EMPTY = torch.ops.aten.empty.memory_format


def gathers_into_buffers(graph: Graph) -> Graph:
    """`graph` with each gather of gloo's writing into a fresh `empty`; itself when there is none."""
    if not any(_gathers_on_gloo(graph)):
        return graph
    safe = graph.copied()
    for gather in list(_gathers_on_gloo(safe)):
        _gather_into_buffer(safe, gather)
    return safe


def _gathers_on_gloo(graph: Graph) -> Iterator[Node]:
    for node in graph.gm.graph.find_nodes(op="call_function", target=_GATHER):
        if runs_on_gloo(group_name(node), node.meta["val"].device):
            yield node


def _gather_into_buffer(graph: Graph, gather: Node) -> None:
    value, nodes = gather.meta["val"], graph.gm.graph
    sizes = graph.named_sizes()
    with nodes.inserting_before(gather):
        shape = [n if isinstance(n, int) else spell_number(n, sizes, nodes) for n in value.shape]
        options = {"dtype": value.dtype, "device": value.device}
        buffer = nodes.call_function(_EMPTY, (shape,), options)
    buffer.meta = dict(gather.meta)
    gather.target = _GATHER_INTO
    gather.kwargs = {"out": buffer}
    _hold_until_waited(graph, gather)


def _hold_until_waited(graph: Graph, gather: Node) -> None:
    """Use what a gather reads once more behind its wait; there is nothing to wait for any more."""
    read = view_base(gather.all_input_nodes[0])
    if read.op == "placeholder":  # compilers leave arguments alone
        return
    for wait in [user for user in gather.users if is_wait(user)]:
        with graph.gm.graph.inserting_after(wait):
            graph.gm.graph.call_function(_WAIT, (read,)).meta = dict(read.meta)
