"""Operators of PyTorch's that ask for grad mode, for compilers that run graphs without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from aotdist.torch_seam.operators import schema_of, training_rnn
from aotdist.trace.operators import functions_of_data

# Recurrent layers by oneDNN for a compiler that runs its graphs without grad mode.
#
# `mkldnn_rnn_layer` asks grad mode whether it is to keep what its backward needs. A forward of ours runs
# without, so the operator stands in the graph as one of our own, which runs with grad mode on, as eager does.

_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
_BACKWARD = torch.ops.aten.mkldnn_rnn_layer_backward.default

_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")
_LIBRARY.define(schema_of(_LAYER).replace("aten::mkldnn_rnn_layer", "training_rnn"))
_TRAINING_LAYER = torch.ops.aotdist.training_rnn.default
_LIBRARY.impl("training_rnn", training_rnn, "CPU")


@torch.library.impl(_LIBRARY, "training_rnn", "Meta")
def _shapes(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _LAYER(*args)


def keep_for_backward(gm: GraphModule) -> None:
    """Let the layers of a graph that have a backward keep what it needs, in place."""
    for node in gm.graph.find_nodes(op="call_function", target=_LAYER):
        if node.meta.get("grad", True):
            node.target = _TRAINING_LAYER


def has_unknown_sizes(gm: GraphModule) -> bool:
    """Whether a graph passes on what a layer or an operator makes: nobody knows its size before it runs."""
    targets = (_TRAINING_LAYER, _BACKWARD, *functions_of_data.OF_OUR_OWN.values())
    return any(gm.graph.find_nodes(op="call_function", target=target) for target in targets)


# Writes through strides, for a compiler that runs its graphs on arguments that require grad.
#
# `as_strided_scatter` refuses such a tensor if it has gaps or is transposed (torch 2.13), also where nothing
# is recorded.

_SCATTER = torch.ops.aten.as_strided_scatter.default


def detach_what_is_written(gm: GraphModule) -> None:
    """Let what the graph writes through strides be detached first, if it is an argument, in place."""
    for node in gm.graph.find_nodes(op="call_function", target=_SCATTER):
        written = node.args[0]
        if isinstance(written, Node) and written.op == "placeholder":
            with gm.graph.inserting_before(node):
                detached = gm.graph.call_function(torch.ops.aten.detach.default, (written,))
            detached.meta = dict(written.meta)
            node.replace_input_with(written, detached)
