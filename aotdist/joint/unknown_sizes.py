"""Operators whose results have sizes that PyTorch cannot tell: they depend on data, or follow from symbols.

- The forward of a CTC loss keeps for the backward as much as the longest target needs. The fake result has
  the size that the targets' own allows, and only the backward's kernel looks at it; PyTorch's has no fake
  kernel.
- `linalg.lstsq` leaves residuals out where a matrix is not of full rank, with the drivers that find out. The
  fake result has them; who looks at them gets what eager gives.
- The fakes of interpolations, and of their gradients, are made in C++, which wants numbers for sizes.

In the graph each is an operator of our own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from aotdist.torch_seam.operators import OpOverload, schema_of, suggest_memory_format

_LIBRARY = torch.library.Library("aotdist", "FRAGMENT")
_ATEN = torch.ops.aten


def _like_loss(log_probs: Tensor, targets: Tensor, *_lengths: Any) -> tuple[Tensor, Tensor]:
    """Shapes: (time, batch, classes), (batch, length) or (sum of lengths,) -> (batch,), and what is kept."""
    time, batch, _ = log_probs.shape
    kept = log_probs.new_empty((batch, time, 2 * targets.shape[-1] + 1))
    return log_probs.new_empty((batch,)), kept


def _like_loss_backward(_grad: Tensor, log_probs: Tensor, *_rest: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _like_lstsq(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Shapes: (*, m, n), (*, m, k) or (*, m) -> (*, n, k) or (*, n), (*, k), (*), (*, min(m, n)).

    The solution lies in memory by columns, of as many elements as the longer side has.
    """
    *batch, rows, columns = a.shape
    right = () if b.dim() < a.dim() else (b.shape[-1],)
    in_memory = a.new_empty((*batch, *right, max(rows, columns)))[..., :columns]
    solution = in_memory.mT if right else in_memory
    of_rank, of_residuals = driver != "gels", rows > columns and driver not in (None, "gelsy")
    residuals = a.new_empty((*batch, *(right or (1,))) if of_residuals else (0,), dtype=a.real.dtype)
    rank = a.new_empty(batch if of_rank else (0,), dtype=torch.int64)
    of_values = driver in ("gelsd", "gelss")
    values = a.new_empty((*batch, min(rows, columns)) if of_values else (0,), dtype=a.real.dtype)
    return solution, residuals, rank, values


def like_resized(tensor: Tensor, size: Sequence[int]) -> Tensor:
    """Shapes: (batch, channels, *), of the rest or all -> (batch, channels, *size)."""
    full = size if len(size) == tensor.dim() else (*tensor.shape[:2], *size)
    kept = torch.contiguous_format if tensor.dim() == 3 else suggest_memory_format(tensor)
    return torch.empty(tuple(full), dtype=tensor.dtype, device=tensor.device, memory_format=kept)


def _like_resized_backward(grad: Tensor, _size: Any, size: Sequence[int], *_rest: Any) -> Tensor:
    return like_resized(grad, size)


_INTERPOLATIONS = (
    *("upsample_nearest1d", "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    "_upsample_bicubic2d_aa",
)
INTERPOLATIONS = frozenset(getattr(_ATEN, name).default for name in _INTERPOLATIONS)
"""Those whose fakes want numbers."""


def _of_our_own(op: OpOverload, like: Callable[..., Any]) -> OpOverload:
    """An operator that runs `op`, and whose fake results are those of `like`."""
    name = op.name().removeprefix("aten::").removeprefix("_").replace(".", "_")
    _LIBRARY.define(schema_of(op).replace(op.name(), name))
    _LIBRARY.impl(name, functools.partial(op.__call__), "CompositeExplicitAutograd")
    torch.library.register_fake(f"aotdist::{name}", like, lib=_LIBRARY)
    return getattr(torch.ops.aotdist, name).default


OF_OUR_OWN: Mapping[OpOverload, OpOverload] = {
    op: _of_our_own(op, like)
    for op, like in (
        (_ATEN._ctc_loss.default, _like_loss),
        (_ATEN._ctc_loss.Tensor, _like_loss),
        (_ATEN._ctc_loss_backward.default, _like_loss_backward),
        (_ATEN._ctc_loss_backward.Tensor, _like_loss_backward),
        (_ATEN.linalg_lstsq.default, _like_lstsq),
        *((getattr(_ATEN, f"{n}_backward").default, _like_resized_backward) for n in _INTERPOLATIONS),
    )
}
"""What stands in a graph for PyTorch's operators."""


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss`: its mean divides by a tensor that C++ fills with the lengths."""
    loss = functional.ctc_loss
    if reduction != "mean" or isinstance(target_lengths, Tensor):
        return loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    losses = loss(log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity)
    lengths = torch.tensor(target_lengths, dtype=losses.dtype, device=losses.device)
    return (losses / lengths.clamp_min(1)).mean()


INSTEAD: Mapping[Any, Callable[..., Any]] = {functional.ctc_loss: _ctc_loss}
"""What is called in a trace for PyTorch's functions."""
