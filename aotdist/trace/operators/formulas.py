"""A loss whose formula PyTorch chooses by data, unless a tensor is no plain one, as in a trace.

Of plain tensors, a weighted and smoothed `cross_entropy` sums what a mask selects, and nothing between. For
subclasses, modes and transforms, PyTorch takes a formula that needs no data, and that rounds otherwise. What
needs data is an operator of our own here, which decides when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from aotdist.torch_seam.functional import FunctionalTensor
from aotdist.torch_seam.modes import under_transform

_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")
_LIBRARY.define("weight_of_targets(Tensor weight, Tensor target, int ignore_index) -> Tensor")
_WEIGHT_OF_TARGETS = torch.ops.aotdist.weight_of_targets.default


@torch.library.impl(_LIBRARY, "weight_of_targets", "CompositeExplicitAutograd")
def _weight_of_targets(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    return weight.gather(0, target.masked_select(target != ignore_index)).sum()


def _like_weight(weight: Tensor, _target: Tensor, _ignore_index: int) -> Tensor:
    return weight.new_empty(())


torch.library.register_fake("aotdist::weight_of_targets", _like_weight, lib=_LIBRARY)


def _cross_entropy(
    _func: Callable[..., Tensor],
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`: the mean of smoothed losses is by the weight of all targets."""
    is_mean = reduction == "mean" and size_average is None and reduce is None
    if (
        weight is None
        or not (is_mean and 0 < label_smoothing <= 1 and _is_plain(input, target, weight))
        or input.size() == target.size()  # of probabilities
        or weight.requires_grad
        or torch.is_autocast_enabled(input.device.type)
    ):
        return NotImplemented
    dim = min(input.dim() - 1, 1)
    log_p = functional.log_softmax(input, dim, dtype=input.dtype)
    loss = functional.nll_loss(log_p, target, weight, ignore_index=ignore_index)
    of_classes = weight.view([-1 if at == dim else 1 for at in range(input.dim())])
    smooth = -(log_p * of_classes).sum(dim)
    smooth.masked_fill_(target == ignore_index, 0.0)
    smooth_loss = smooth.sum() / _WEIGHT_OF_TARGETS(weight, target, ignore_index)
    return (1 - label_smoothing) * loss + smooth_loss * (label_smoothing / input.size(dim))


def _is_plain(*tensors: Tensor) -> bool:
    """Whether eager takes the formula for plain tensors; of wrappers and in transforms it takes the other."""
    return all(isinstance(tensor, FunctionalTensor) for tensor in tensors) and not under_transform()


INSTEAD: Mapping[Any, Callable[..., Any]] = {functional.cross_entropy: _cross_entropy}
"""What is called in a trace for PyTorch's functions, where results are to have eager's bits."""
