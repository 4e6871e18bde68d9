"""Gradients whose formula PyTorch chooses by data, unless a tensor is no plain one, as in a trace.

Of plain tensors, `prod` looks for zeros and divides where there are none; `masked_fill` and a weighted
`cross_entropy` sum what a mask selects, and nothing between; `max` and the like fill zeros where they would
multiply by them. For subclasses, modes and transforms, PyTorch takes formulas that need no data, and that
round otherwise. What needs data is an operator of our own here, which decides when it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from aotdist.torch_seam.functional import FunctionalTensor
from aotdist.torch_seam.modes import under_transform

_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")
_LIBRARY.define("gradients_of_prod(Tensor[] tensors, int[] dims, bool keepdim, bool history) -> Tensor[]")
_LIBRARY.define("masked_sum(Tensor numbers, Tensor mask) -> Tensor")
_LIBRARY.define("weight_of_targets(Tensor weight, Tensor target, int ignore_index) -> Tensor")
_GRADIENTS_OF_PROD = torch.ops.aotdist.gradients_of_prod.default
_MASKED_SUM = torch.ops.aotdist.masked_sum.default
_WEIGHT_OF_TARGETS = torch.ops.aotdist.weight_of_targets.default


@torch.library.impl(_LIBRARY, "gradients_of_prod", "CompositeExplicitAutograd")
def _gradients_of_prod(
    tensors: Sequence[Tensor], dims: Sequence[int], keepdim: bool, history: bool
) -> list[Tensor]:
    """Gradients of a product, of any order, by eager's own formulas.

    Args:
        tensors: what is multiplied; the gradient that arrives for the product; those that arrive for what
            this function gives for the tensors before; and so on.
        dims: the dimension that is multiplied over; empty for all.
        keepdim: whether it is kept.
        history: whether they are to be differentiated in turn: eager's formula is another then.

    Returns:
        a gradient for each tensor that does not arrive last.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    with torch.enable_grad():
        grads = _differentiated(leaves, dims, keepdim, history=history)
    likes = _like_gradients(tensors, dims, keepdim, history) if _lie_otherwise(grads, tensors) else tensors
    return [
        torch.empty_like(like).copy_(grad.detach()) if _lie_otherwise([grad], [like]) else grad.detach()
        for grad, like in zip(grads, likes, strict=False)
    ]


def _differentiated(
    leaves: Sequence[Tensor], dims: Sequence[int], keepdim: bool, *, history: bool
) -> Sequence[Tensor]:
    num_below = _num_below(len(leaves))
    if not num_below:
        return [_multiplied(leaves[0], dims, keepdim)]
    below, arriving = leaves[:num_below], leaves[num_below:]
    results = _differentiated(below, dims, keepdim, history=True)
    return torch.autograd.grad(
        results, below, arriving, create_graph=history, allow_unused=True, materialize_grads=True
    )


def _multiplied(factors: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    return torch.prod(factors, dims[0], keepdim) if dims else torch.prod(factors)


def _num_below(num_tensors: int) -> int:
    """How many of the tensors of one order the order below takes: 0 of 1, 1 of 2, 2 of 3, 3 of 5, 5 of 8."""
    num_below, num = 0, 1
    while num < num_tensors:
        num_below, num = num, num + max(num_below, 1)
    return num_below


def _lie_otherwise(grads: Sequence[Tensor], likes: Sequence[Tensor]) -> bool:
    return any(grad.stride() != like.stride() for grad, like in zip(grads, likes, strict=False))


def _like_gradients(
    tensors: Sequence[Tensor], dims: Sequence[int], keepdim: bool, history: bool
) -> list[Tensor]:
    """Those of the first order lie as where nothing is zero."""
    if len(tensors) > 2:
        return [torch.empty_like(tensor) for tensor in tensors[: _num_below(len(tensors))]]
    factors, grad = (torch.empty_like(tensor, device="meta") for tensor in tensors)
    product = _multiplied(factors, dims, keepdim=True)
    lies = (grad if keepdim or not dims else grad.unsqueeze(*dims)) * (product / factors)
    return [torch.empty_strided(lies.size(), lies.stride(), dtype=lies.dtype, device=tensors[0].device)]


torch.library.register_fake("aotdist::gradients_of_prod", _like_gradients, lib=_LIBRARY)


class _Gradients(torch.autograd.Function):
    passes_gradients_on = True

    @staticmethod
    def forward(
        ctx: Any, dims: Sequence[int], keepdim: bool, history: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.how = dims, keepdim
        return tuple(_GRADIENTS_OF_PROD(tensors, dims, keepdim, history))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        found = _Gradients.apply(*ctx.how, torch.is_grad_enabled(), *ctx.saved_tensors, *grads)
        return (None, None, None, *found)


class _Product(torch.autograd.Function):
    passes_gradients_on = True

    @staticmethod
    def forward(ctx: Any, factors: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
        ctx.save_for_backward(factors)
        ctx.how = dims, keepdim
        return _multiplied(factors, dims, keepdim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (found,) = _Gradients.apply(*ctx.how, torch.is_grad_enabled(), *ctx.saved_tensors, *grads)
        return found, None, None


def _product(
    function: Callable[..., Tensor],
    input: Tensor,  # noqa: A002  (the name that callers use)
    dim: int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    **names: Any,
) -> Tensor:
    if names or not input.dim() or isinstance(dim, str) or not _chooses_by_data(input):
        return function(input, *([] if dim is None else [dim, keepdim]), dtype=dtype, **names)
    factors = input if dtype is None else input.to(dtype)
    return _Product.apply(factors, () if dim is None else (dim,), keepdim)


class _Extreme(torch.autograd.Function):
    passes_gradients_on = True

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        found = function(numbers)
        ctx.save_for_backward(numbers, found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (numbers, found) = grads, ctx.saved_tensors
        mask = (numbers == found).logical_or(numbers.isnan().logical_and(found.isnan()))
        zeros = grad.new_zeros(numbers.size(), dtype=numbers.dtype)
        return zeros.masked_fill(mask, grad / mask.sum()), None


def _extreme(function: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
    """The largest, smallest or middle number of all: on a CPU zeros are filled, on a GPU multiplied."""
    if args or kwargs or input.is_cuda or not _chooses_by_data(input):
        return function(input, *args, **kwargs)
    return _Extreme.apply(input, function)


@torch.library.impl(_LIBRARY, "masked_sum", "CompositeExplicitAutograd")
def _masked_sum(numbers: Tensor, mask: Tensor) -> Tensor:
    return numbers.masked_select(mask).sum()


def _like_sum(numbers: Tensor, _mask: Tensor) -> Tensor:
    return numbers.new_empty(())


torch.library.register_fake("aotdist::masked_sum", _like_sum, lib=_LIBRARY)


class _MaskedSum(torch.autograd.Function):
    passes_gradients_on = True

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.size = numbers.size()
        return _MASKED_SUM(numbers, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return torch.where(mask, grads[0], 0).expand(ctx.size), None


class _Fill(torch.autograd.Function):
    passes_gradients_on = True

    @staticmethod
    def forward(ctx: Any, input: Tensor, mask: Tensor, value: Tensor) -> Tensor:  # noqa: A002
        ctx.save_for_backward(mask)
        return input.masked_fill(mask, value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor]:
        (mask,) = ctx.saved_tensors
        rest = grads[0].masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        return rest, None, _MaskedSum.apply(grads[0], mask)


def _fill(function: Callable[..., Tensor], input: Tensor, mask: Tensor, value: Any) -> Tensor:  # noqa: A002
    if not isinstance(value, Tensor) or not _chooses_by_data(value) or not _is_plain(input, mask):
        return function(input, mask, value)
    return _Fill.apply(input, mask, value)


def _fill_in_place(function: Callable[..., Tensor], input: Tensor, mask: Tensor, value: Any) -> Tensor:  # noqa: A002
    if not isinstance(value, Tensor) or not _chooses_by_data(value) or not _is_plain(input, mask):
        return function(input, mask, value)
    return input.copy_(_Fill.apply(input, mask, value))


@torch.library.impl(_LIBRARY, "weight_of_targets", "CompositeExplicitAutograd")
def _weight_of_targets(weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    return weight.gather(0, target.masked_select(target != ignore_index)).sum()


def _like_weight(weight: Tensor, _target: Tensor, _ignore_index: int) -> Tensor:
    return weight.new_empty(())


torch.library.register_fake("aotdist::weight_of_targets", _like_weight, lib=_LIBRARY)


def _cross_entropy(
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
        return functional.cross_entropy(
            input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
        )
    dim = min(input.dim() - 1, 1)
    log_p = functional.log_softmax(input, dim, dtype=input.dtype)
    loss = functional.nll_loss(log_p, target, weight, ignore_index=ignore_index)
    of_classes = weight.view([-1 if at == dim else 1 for at in range(input.dim())])
    smooth = -(log_p * of_classes).sum(dim)
    smooth.masked_fill_(target == ignore_index, 0.0)
    smooth_loss = smooth.sum() / _WEIGHT_OF_TARGETS(weight, target, ignore_index)
    return (1 - label_smoothing) * loss + smooth_loss * (label_smoothing / input.size(dim))


def _chooses_by_data(tensor: Tensor) -> bool:
    """Whether eager takes the formula for plain tensors; of wrappers and in transforms it takes the other."""
    return torch.is_grad_enabled() and tensor.requires_grad and _is_plain(tensor)


def _is_plain(*tensors: Tensor) -> bool:
    return all(isinstance(tensor, FunctionalTensor) for tensor in tensors) and not under_transform()


INSTEAD: Mapping[Any, Callable[..., Any]] = {
    **{function: functools.partial(_product, function) for function in (torch.prod, torch.Tensor.prod)},
    **{
        getattr(owner, name): functools.partial(_extreme, getattr(owner, name))
        for owner in (torch, torch.Tensor)
        for name in ("max", "min", "median", "nanmedian")
    },
    **{
        function: functools.partial(_fill, function)
        for function in (torch.masked_fill, torch.Tensor.masked_fill)
    },
    torch.Tensor.masked_fill_: functools.partial(_fill_in_place, torch.Tensor.masked_fill_),
    functional.cross_entropy: _cross_entropy,
}
"""What is called in a trace for PyTorch's functions, where results are to have eager's bits."""
