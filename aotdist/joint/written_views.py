"""Inputs that are views and are written with history: gradients that pass the write are laid out as in eager.

Eager's `CopySlices` gives the operator that wrote a view a contiguous gradient, whatever the view's strides.
A stand-in is no view, so the gradient would have other strides, those of the other operands too, and sums of
these other last bits. `CopySlices` also copies what the operator sends back to the view into the gradient
that arrived, so that the two are one kind of tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from aotdist.convention.naming import NAMED
from aotdist.convention.view_log import ViewLog
from aotdist.errors import UnsupportedProgram
from aotdist.joint.inputs import Inputs
from aotdist.program import PrimalIdx, Slot
from aotdist.subclasses.protocol import inner_tensors, is_wrapper
from aotdist.torch_seam.autograd import history_of


class WrittenViews:
    """Finds the nodes that writes of such inputs leave in autograd's graph.

    Args:
        inputs: the stand-ins.
        log: has the writes that eager does not count.
    """

    def __init__(self, inputs: Inputs, log: ViewLog) -> None:
        self._inputs, self._log = inputs, log
        self._last: dict[PrimalIdx, Any] = {}

    def notice(self) -> None:
        """Hook the node of each input's last write, to lay gradients out as eager does; called after writes.

        Raises:
            UnsupportedProgram: eager does not count the write.
        """
        for idx, tensor in self._inputs.views():
            node = history_of(tensor)
            if node is None or node.name() == NAMED or node is self._last.get(idx):
                continue
            if any(self._log.views.is_or_shows(write.tensor, tensor) for write in self._log.uncounted):
                raise _keeps_its_history(self._inputs.row()[idx].slot)
            self._last[idx] = node
            node.register_prehook(functools.partial(_laid_out_anew, tensor.output_nr))
            node.register_hook(functools.partial(_copied_in, tensor.output_nr))


def _laid_out_anew(position: int, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """The gradients of a node's results, that at `position` made contiguous, as `CopySlices` makes it."""
    laid_out = list(grads)
    grad = grads[position]
    if grad is not None:
        laid_out[position] = grad.clone(memory_format=torch.contiguous_format)
    return tuple(laid_out)


def _copied_in(
    position: int, sent: Sequence[torch.Tensor | None], grads: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...] | None:
    """The gradients that a node sends back, the first converted to the kind of tensor that arrived."""
    (first, *others), grad = sent, grads[position]
    if first is None or grad is None or _kinds(first) == _kinds(grad):
        return None
    return torch.empty_like(grad).copy_(first), *others


def _kinds(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The classes of wrappers that a tensor consists of, by path."""
    inside = [(path, type(inner)) for path, inner in inner_tensors(tensor) if is_wrapper(inner)]
    return (type(tensor) if is_wrapper(tensor) else None, *inside)


def _keeps_its_history(slot: Slot) -> UnsupportedProgram:
    """An error for a write that autograd does not count, so that the view keeps its history."""
    return UnsupportedProgram(
        f"`{slot}` is a view that an operator of lists with wrappers writes: in eager what it is a view of "
        "gets a history, and it keeps its own",
        stage="joint",
        fix="write it by itself (`x.mul_(2)` for `torch._foreach_mul_([x], 2)`), or take the view inside",
    )
