"""Inputs that are views, and are written with history: how their gradients lie where they pass the write.

Eager's `CopySlices` gives the operator that wrote a view a contiguous gradient, however the view lies. A
stand-in is no view, so the gradient would lie as what was made of it: those of the other operands would have
other strides, and sums of them other last bits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from aotdist.convention.naming import NAMED
from aotdist.joint.inputs import Inputs
from aotdist.program import PrimalIdx
from aotdist.torch_seam import history_of


class WrittenViews:
    """Finds the nodes that writes of such inputs leave in autograd's graph.

    Args:
        inputs: the stand-ins.
    """

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._last: dict[PrimalIdx, Any] = {}

    def notice(self) -> None:
        """See to it that gradients are laid out anew at the last write of each; called after every write."""
        for idx, tensor in self._inputs.views():
            node = history_of(tensor)
            if node is None or node.name() == NAMED or node is self._last.get(idx):
                continue
            self._last[idx] = node
            node.register_prehook(functools.partial(_laid_out_anew, tensor.output_nr))


def _laid_out_anew(position: int, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a node's results, that at `position` as `CopySlices` copies it."""
    laid_out = list(grads)
    grad = grads[position]
    if grad is not None:
        laid_out[position] = grad.clone(memory_format=torch.contiguous_format)
    return tuple(laid_out)
