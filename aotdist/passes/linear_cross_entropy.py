"""The loss of a linear layer's logits, by chunks of rows: an operator that never holds all logits.

A chunk's logits are made by one matrix product, and while they exist, everything is computed from them: the
loss of each row, and the gradient with respect to the logits, which two more products propagate to the
layer's input and weight at once. So the forward computes the gradients, for a sum of losses with an incoming
gradient of 1, and the backward only scales them: mean, loss scale and incoming gradient are one number for
all rows. Recomputing the logits in the backward would not hold the weight's gradient between the two, but
take a fourth product of this size; between the end of a forward and the beginning of its backward there is
not much that could use the memory.

The weight's gradient is summed up in float32 (float64 for float64), chunk after chunk, in place: in one
order, so that it is the same in every run. Logits and their gradients are rounded as eager rounds them.

`MADE_OF` decomposes the operator for a compiler that fuses: into a kernel and three products a chunk. There,
a chunk's product takes the sum that the last chunk updated, without reading it: nothing else would keep a
compiler from making the logits of two chunks at the same time.

Source: the idea of chunks with gradients in the forward is Liger-Kernel's, arXiv:2410.10989.
Shapes: N rows, D features, V classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from aotdist.torch_seam.operators import OpOverload, own_operator


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which losses of logits of `dtype` are computed, and gradients summed."""
    return torch.promote_types(dtype, torch.float32)


def _linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    num_rows: int,
    of_input: bool,
    of_weight: bool,
) -> list[torch.Tensor]:
    losses: list[torch.Tensor] = []
    of_rows: list[torch.Tensor] = []
    summed: torch.Tensor | None = None
    done: torch.Tensor | None = None
    for rows, own_labels in zip(input.split(num_rows), labels.split(num_rows), strict=True):
        logits = torch.ops.aotdist.product_after(rows, weight.t(), done)
        loss, gradient = _loss_of_rows(logits, own_labels, ignore_index)
        losses.append(loss)
        if of_input:
            of_rows.append(gradient @ weight)
        if of_weight and summed is None:
            summed = torch.ops.aotdist.wide_product(gradient.t(), rows)
        elif of_weight:
            summed = torch.ops.aotdist.add_product_(summed, gradient.t(), rows)
        done = summed if of_weight else of_rows[-1] if of_input else loss
    is_counted = labels != ignore_index
    total = torch.where(is_counted, torch.cat(losses), 0.0).sum()
    count = is_counted.sum(dtype=total.dtype)
    gradients = [torch.cat(of_rows)] if of_input else []
    return [total, count, *gradients, *([] if summed is None else [summed])]


def _loss_of_rows(
    logits: torch.Tensor, labels: torch.Tensor, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row, and the gradient of the sum of those that count with respect to the logits."""
    is_counted = (labels != ignore_index)[:, None]
    label = torch.where(is_counted, labels[:, None], 0)
    values = logits.to(wide(logits.dtype))
    largest = values.amax(1, keepdim=True)
    shares = torch.exp(values - largest)
    total = shares.sum(1, keepdim=True)
    log_total = largest + torch.log(total)
    loss = log_total - values.gather(1, label)
    is_label = torch.arange(logits.size(1), device=logits.device) == label
    gradient = shares / total - is_label.to(values.dtype)
    return loss[:, 0], torch.where(is_counted, gradient, 0.0).to(logits.dtype)


def _like_linear_cross_entropy(
    input: torch.Tensor, weight: torch.Tensor, *options: Any
) -> list[torch.Tensor]:
    *_, of_input, of_weight = options
    dtype = wide(input.dtype)
    gradients = [input.new_empty(input.shape)] if of_input else []
    gradients += [input.new_empty(weight.shape, dtype=dtype)] if of_weight else []
    return [input.new_empty((), dtype=dtype), input.new_empty((), dtype=dtype), *gradients]


def _product_after(one: torch.Tensor, other: torch.Tensor, done: torch.Tensor | None) -> torch.Tensor:
    return one @ other


def _wide_product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    dtype = wide(one.dtype)
    if one.is_cuda and one.dtype != dtype:
        return torch.ops.aten.mm.dtype(one, other, dtype)
    return one.to(dtype) @ other.to(dtype)


def _add_product_(summed: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if one.is_cuda and one.dtype != summed.dtype:
        torch.ops.aten.addmm.dtype_out(summed, one, other, summed.dtype, out=summed)
        return summed
    return summed.addmm_(one.to(summed.dtype), other.to(summed.dtype))


def _like_wide_product(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one.new_empty((one.size(0), other.size(1)), dtype=wide(one.dtype))


def _like_add_product_(summed: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return summed


LINEAR_CROSS_ENTROPY = own_operator(
    "linear_cross_entropy(Tensor input, Tensor weight, Tensor labels, int ignore_index,"
    " int num_rows, bool of_input, bool of_weight) -> Tensor[]",
    _linear_cross_entropy,
    _like_linear_cross_entropy,
)
"""The sum of the losses of all rows that count, how many these are, and those gradients of the sum that are
asked for: that of the input, in its dtype, and that of the weight, in `wide` of it.

Args:
    input, weight: of the linear layer. Shapes: (N, D), (V, D).
    labels: for each row, int64. Shapes: (N,).
    ignore_index: the label of rows that do not count.
    num_rows: how many rows are one chunk.
    of_input, of_weight: which gradients are asked for.
"""

own_operator("product_after(Tensor one, Tensor other, Tensor? done) -> Tensor", _product_after)
own_operator("wide_product(Tensor one, Tensor other) -> Tensor", _wide_product, _like_wide_product)
own_operator(
    "add_product_(Tensor(a!) summed, Tensor one, Tensor other) -> Tensor(a!)",
    _add_product_,
    _like_add_product_,
)

MADE_OF: Mapping[OpOverload, Callable[..., Any]] = {LINEAR_CROSS_ENTROPY: _linear_cross_entropy}
"""The operator's decomposition, for a compiler that fuses."""
