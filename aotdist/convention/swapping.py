"""Tensors that become each other: two Python objects exchange all that they are (`swap_tensors`)."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from aotdist.torch_seam.swaps import swap_contents, use_count


@dataclass(frozen=True, slots=True)
class Exchange:
    """Two tensors of a trace that have become each other.

    Args:
        first: the one, as a Python object.
        second: the other.
    """

    first: torch.Tensor
    second: torch.Tensor

    def of(self, value: Any) -> Any:
        """The object that is now what `value` was."""
        if value is self.first:
            return self.second
        return self.first if value is self.second else value


def check_swappable(*tensors: torch.Tensor) -> None:
    """What eager asks of tensors before they become others, asked before anything is done to them.

    Raises:
        RuntimeError: something else holds one of them, as eager says it.
    """
    for tensor in tensors:
        if weakref.getweakrefs(tensor):
            raise RuntimeError("Cannot swap a tensor because it has weakref associated with it")
        held = use_count(tensor)
        if held == 1:
            continue
        if held > 2 or not (tensor.is_leaf and tensor.requires_grad):
            raise RuntimeError(_HELD.format(held))
        edge = get_gradient_edge(tensor)
        if use_count(tensor) > 2:  # it was something else: the edge is new
            raise RuntimeError(_HELD.format(held))
        edge.node.register_prehook(_refuse_gradients)


def swap(first: torch.Tensor, second: torch.Tensor, poisons_first: bool, poisons_second: bool) -> None:
    """Let two tensors become each other; gradients on their way to one that is poisoned are refused."""
    for tensor, is_poisoned in ((first, poisons_first), (second, poisons_second)):
        if is_poisoned:
            get_gradient_edge(tensor).node.register_prehook(_refuse_gradients)
    swap_contents(first, second)


_HELD = (
    "Expected use_count of a tensor to be 1 or 2 with an AccumulateGrad node but got {}; make sure you are "
    "not holding references to the tensor in other places."
)


def _refuse_gradients(_: Any) -> None:
    raise RuntimeError(
        "Trying to execute AccumulateGrad node that was poisoned by swap_tensors: the tensor that the "
        "gradient is for was swapped after its use"
    )
