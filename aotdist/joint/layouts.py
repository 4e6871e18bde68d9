"""How the results of some kernels lie in memory, where PyTorch's fakes say otherwise.

A trace decides by strides which `reshape` is a view, and what a result is a view of, so they have to be those
that come. Of batch normalisation on a CPU, fakes claim that whatever is permuted stays so; the kernels give a
contiguous result, or one with the channels last if the input has them there (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aotdist.torch_seam import OpOverload, suggest_memory_format

_ATEN = torch.ops.aten
_INPUT_OF: Mapping[OpOverload, int] = {
    _ATEN.native_batch_norm.default: 0,
    _ATEN._native_batch_norm_legit.default: 0,
    _ATEN._native_batch_norm_legit.no_stats: 0,
    _ATEN._native_batch_norm_legit_functional.default: 0,
    _ATEN._native_batch_norm_legit_no_training.default: 0,
    _ATEN.native_batch_norm_backward.default: 1,
}
"""Operators whose first result is made like one of the arguments, by the argument's position."""


def as_kernels_lie(func: OpOverload, args: tuple[Any, ...], result: Any) -> Any:
    """What an operator gave for fakes, laid out as its kernel gives it."""
    position = _INPUT_OF.get(func)
    if position is None or not isinstance(result[0], torch.Tensor) or args[position].device.type != "cpu":
        return result
    first, *others = result
    like = args[position]
    # The forward asks first whether its input is contiguous; with sizes of one it may be so in both formats.
    contiguous = position == 0 and like.is_contiguous()
    kept = torch.contiguous_format if contiguous else suggest_memory_format(like)
    return (torch.empty_like(first, memory_format=kept), *others)
