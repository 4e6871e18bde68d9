"""Backwards of convolutions with symbolic sizes, on a CPU, for Inductor.

Its lowering makes the strides of the input, and so its sizes, numbers (torch 2.13, `torch.compile` too): each
size of images would be a program of its own. All that it generates is a call of the library, so it is given
an operator that is that call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from aotdist.sizes import is_symbolic
from aotdist.torch_seam.operators import schema_of

_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")
_BACKWARD = torch.ops.aten.convolution_backward.default
_ARGUMENTS = schema_of(_BACKWARD).partition("(")[2]
_LIBRARY.define(f"convolution_backward({_ARGUMENTS}", tags=(torch.Tag.flexible_layout,))


def _call(*args: Any) -> Any:
    return _BACKWARD(*args)


_LIBRARY.impl("convolution_backward", _call, "CompositeExplicitAutograd")
torch.library.register_fake("aotdist::convolution_backward", _call, lib=_LIBRARY)
_OPAQUE = torch.ops.aotdist.convolution_backward.default


def keep_sizes_symbolic(gm: GraphModule) -> None:
    """Let the library compute backwards of convolutions whose input has symbolic sizes, in place."""
    for node in gm.graph.find_nodes(op="call_function", target=_BACKWARD):
        convolved = node.args[1]
        assert isinstance(convolved, Node), "a convolution is of a tensor"
        value = convolved.meta["val"]
        if value.device.type == "cpu" and is_symbolic(tuple(value.shape)):
            node.target = _OPAQUE
