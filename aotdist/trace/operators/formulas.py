"""Gradients whose formula PyTorch chooses by data, unless a tensor is no plain one, as in a trace.

Of plain tensors, `prod` looks for zeros and divides where there are none; a weighted `cross_entropy` sums
what a mask selects, and nothing between. For subclasses, modes and transforms, PyTorch takes formulas that
need no data, and that round otherwise. What needs data is an operator of our own here, which decides when it
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from aotdist.torch_seam.functional import FunctionalTensor
from aotdist.torch_seam.modes import under_transform

_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")
_LIBRARY.define("prod_backward(Tensor grad, Tensor factors, int[] dims, bool keepdim) -> Tensor")
_LIBRARY.define("weight_of_targets(Tensor weight, Tensor target, int ignore_index) -> Tensor")
_PROD_BACKWARD = torch.ops.aotdist.prod_backward.default
_WEIGHT_OF_TARGETS = torch.ops.aotdist.weight_of_targets.default


@torch.library.impl(_LIBRARY, "prod_backward", "CompositeExplicitAutograd")
def _prod_backward(grad: Tensor, factors: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The gradient of a product, by eager's own formula.

    Args:
        grad: that of the product.
        factors: what is multiplied.
        dims: the dimension that is multiplied over; empty for all.
        keepdim: whether it is kept.
    """
    leaf = factors.detach().requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad(_multiplied(leaf, dims, keepdim), leaf, grad.detach())
    like = _like_gradient(grad, factors, dims, keepdim)
    return found if found.stride() == like.stride() else torch.empty_like(like).copy_(found)


def _multiplied(factors: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return torch.prod(factors, dims[0], keepdim) if dims else torch.prod(factors)


def _like_gradient(grad: Tensor, factors: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Where nothing is zero: the other branch may lie otherwise."""
    grad, numbers = (torch.empty_like(tensor, device="meta") for tensor in (grad, factors))
    product = _multiplied(numbers, dims, keepdim=True)
    lies = (grad if keepdim or not dims else grad.unsqueeze(*dims)) * (product / numbers)
    return torch.empty_strided(lies.size(), lies.stride(), dtype=lies.dtype, device=factors.device)


torch.library.register_fake("aotdist::prod_backward", _like_gradient, lib=_LIBRARY)


class _Product(torch.autograd.Function):
    passes_gradients_on = True

    @staticmethod
    def forward(ctx: Any, factors: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
        ctx.save_for_backward(factors)
        ctx.how = dims, keepdim
        return _multiplied(factors, dims, keepdim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (factors,), (dims, keepdim) = ctx.saved_tensors, ctx.how
        if torch.is_grad_enabled():
            return _with_history(grads[0], factors, dims, keepdim), None, None
        return _PROD_BACKWARD(grads[0], factors, dims, keepdim), None, None


def _with_history(grad: Tensor, factors: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The gradient of a product, to be differentiated: each factor's is the product of all others."""
    if not dims:
        return _with_history(grad, factors.flatten(), (0,), keepdim=False).view(factors.size())
    dim = dims[0]
    one = torch.ones_like(factors.narrow(dim, 0, 1))
    count = factors.size(dim) - 1
    before = torch.cat([one, factors.narrow(dim, 0, count)], dim).cumprod(dim)
    after = torch.cat([one, factors.narrow(dim, 1, count).flip(dim)], dim).cumprod(dim).flip(dim)
    return (grad if keepdim or not grad.dim() else grad.unsqueeze(dim)) * (before * after).conj()


def _product(
    _func: Callable[..., Tensor],
    input: Tensor,  # noqa: A002  (the name that callers use)
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    **names: Any,
) -> Tensor:
    is_plain = torch.is_grad_enabled() and input.requires_grad and _is_plain(input)
    if names or not input.dim() or isinstance(dim, str) or not is_plain:
        return NotImplemented
    factors = input if dtype is None else input.to(dtype)
    return _Product.apply(factors, () if dim is None else (dim,), keepdim)


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


INSTEAD: Mapping[Any, Callable[..., Any]] = {
    torch.prod: _product,
    torch.Tensor.prod: _product,
    functional.cross_entropy: _cross_entropy,
}
"""What is called in a trace for PyTorch's functions, where results are to have eager's bits."""
