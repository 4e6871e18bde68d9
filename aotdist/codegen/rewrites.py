"""Rewrites of graphs that change no bit: what every compiler is given, and what the reference emitter runs.

`inductor_rewrites.py` has those for Inductor.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Node

from aotdist.partition.traits import is_wait, view_base
from aotdist.passes.collectives import group_name
from aotdist.program import GRADIENT_ROLES, Graph
from aotdist.torch_seam.groups import runs_on_gloo
from aotdist.torch_seam.nodes import spell_number
from aotdist.torch_seam.operators import HigherOrderOperator, OpOverload
from aotdist.torch_seam.symbols import depends_on_data

# Gathers into a buffer of the graph's own, where gloo gathers.
#
# On gloo, `all_gather_into_tensor` is a coalesced gather, which corrupts the heap once two are in flight: on
# torch 2.11 and 2.13, ranks that start two and then wait for both abort within some thousand rounds. Its
# `out` form is a plain gather, and is sound. We start gathers ahead, so every compiler is given that form.
#
# Inductor knows that a gather reads its input until it has been waited for, but not of the `out` form: it
# lets a kernel that runs meanwhile write there. So the input has another use behind the wait.

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_GATHER_INTO = torch.ops._c10d_functional.all_gather_into_tensor_out.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_EMPTY = torch.ops.aten.empty.memory_format
_SIZE = torch.ops.aten.sym_size.int


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
    with nodes.inserting_before(gather):
        shape = [_size_gathered(graph, gather, dim) for dim in range(value.dim())]
        options = {"dtype": value.dtype, "device": value.device}
        buffer = nodes.call_function(_EMPTY, (shape,), options)
    buffer.meta = dict(gather.meta)
    gather.target = _GATHER_INTO
    gather.kwargs = {"out": buffer}
    _hold_until_waited(graph, gather)


def _size_gathered(graph: Graph, gather: Node, dim: int) -> int | Node:
    """A size of the gathered tensor; one that depends on data is computed from that of the input."""
    number, nodes, (sent,) = gather.meta["val"].shape[dim], graph.gm.graph, gather.all_input_nodes
    if not depends_on_data(number):
        return number if isinstance(number, int) else spell_number(number, graph.named_sizes(), nodes)
    size = nodes.call_function(_SIZE, (sent, dim))
    size.meta["val"] = sent.meta["val"].shape[dim]
    if dim > 0:
        return size
    whole = nodes.call_function(operator.mul, (size, gather.args[1]))
    whole.meta["val"] = number
    return whole


def _hold_until_waited(graph: Graph, gather: Node) -> None:
    """Read the gather's input once more behind its wait, by a wait that has nothing to wait for."""
    read = view_base(gather.all_input_nodes[0])
    if read.op == "placeholder":  # compilers leave arguments alone
        return
    for wait in [user for user in gather.users if is_wait(user)]:
        with graph.gm.graph.inserting_after(wait):
            graph.gm.graph.call_function(_WAIT, (read,)).meta = dict(read.meta)


# Tangents of any strides, for a backward that runs operator by operator.
#
# A tangent is traced with the strides of its output, and may arrive expanded or transposed. Eager does not
# copy it first, and a reduction over other strides adds up in another order, so the graph takes it as it is.
# Where the trace depends on strides, it is mostly a `reshape` that became a `view`; whatever depends on a
# tangent is a `reshape` again.
#
# Some formulas call `contiguous`, which leaves no node if the traced tensor is contiguous, and their kernels
# rely on it. With these, and if the user's own backward reads strides, tangents are copied first.

_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default)
_BOUND_TO_STRIDES = (
    _ATEN.as_strided.default,
    _ATEN.as_strided_scatter.default,
    _ATEN.view.dtype,
    _ATEN.view_as_complex.default,
    _ATEN.view_as_real.default,
    _ATEN._cdist_backward.default,
    _ATEN._weight_norm_interface_backward.default,
    _ATEN.cudnn_batch_norm_backward.default,
    _ATEN.native_group_norm_backward.default,
)
"""Operators that name strides, or whose gradient autograd's formulas make contiguous."""


def takes_any_strides(backward: Graph) -> bool:
    """Whether nothing that depends on a tangent is bound to strides."""
    bound = {
        *backward.calls(_is_bound_to_strides),
        *(node for node in backward.gm.graph.nodes if "strides_asked" in node.meta),
    }
    return not bound or bound.isdisjoint(_tangents_and_descendants(backward))


def _is_bound_to_strides(node: Node) -> bool:
    return node.target in _BOUND_TO_STRIDES or isinstance(node.target, HigherOrderOperator)


def reshapes(backward: Graph) -> dict[Node, OpOverload]:
    """A `reshape` for each `view` that depends on a tangent."""
    views = (node for node in _tangents_and_descendants(backward) if node.target in _VIEWS)
    return dict.fromkeys(views, _ATEN.reshape.default)


def _tangents_and_descendants(graph: Graph) -> set[Node]:
    """The tangents, and what is computed from them."""
    named = graph.named_placeholders()
    return graph.descendants(node for slot, node in named.items() if slot.role in GRADIENT_ROLES)
