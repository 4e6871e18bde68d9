"""Interpolation to sizes that are symbols (`F.interpolate(x, size=y.shape[-2:])`).

What `F.interpolate` calls takes sizes and scales to C++, which wants numbers there, and computes the sizes of
the result for what it calls in turn. That takes symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from aotdist.sizes import is_symbolic
from aotdist.torch_seam.functions import interpolated_size, interpolation


def _interpolate(
    tensor: torch.Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.interpolate`, which checks the arguments if there are no symbols."""
    function = interpolation(mode, tensor.dim() - 2, antialias=antialias)
    is_nearest = mode.startswith("nearest")
    is_usual = (size is None) is not (scale_factor is None) and not (is_nearest and align_corners is not None)
    if function is None or not is_usual or not is_symbolic((tuple(tensor.shape[2:]), size)):
        return functional.interpolate(
            tensor, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
        )
    scales = _for_each(scale_factor, tensor.dim() - 2)
    sizes = interpolated_size(tensor.shape, _for_each(size, tensor.dim() - 2), scales)
    flags = [] if is_nearest else [bool(align_corners)]
    return function(tensor, sizes, *flags, *(scales if scales and not recompute_scale_factor else ()))


def _for_each(value: Any, num_dims: int) -> Sequence[Any] | None:
    return value if value is None or isinstance(value, (list, tuple)) else [value] * num_dims


INSTEAD: Mapping[Any, Callable[..., Any]] = {functional.interpolate: _interpolate}
"""What is called in a trace for PyTorch's functions."""
