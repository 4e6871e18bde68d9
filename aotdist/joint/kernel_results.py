"""What some kernels give, where PyTorch's fakes say otherwise, or refuse (torch 2.13).

A trace decides by strides which `reshape` is a view, and what a result is a view of, so they have to be those
that come.

- Of batch normalisation on a CPU, fakes claim that whatever is permuted stays so; the kernels give a
  contiguous result, or one with the channels last if the input has them there.
- Some fakes make numbers of symbolic sizes, unless PyTorch is told to run its kernels in Python: those of
  `constant_pad_nd`, Fourier transforms, `complex` and `polar`. Each size would have an artifact of its own.
- Grouped products (of experts) fakes allow in bf16 only, and without the gaps behind rows that the kernels
  leave: these begin at multiples of 16 bytes.
- The backward of `embedding_bag` with sparse gradients makes the map from indices to bags where the forward's
  kernel did without it; its fake takes the empty map as it is, and has as many gradients as that.
- What cannot be a view, fakes refuse with a `ValueError`; who then reshapes catches a `RuntimeError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from aotdist.joint.gpu_results import as_on_gpu
from aotdist.joint.unknown_sizes import INTERPOLATIONS, like_resized
from aotdist.sizes import is_symbolic
from aotdist.torch_seam.modes import python_kernels
from aotdist.torch_seam.operators import OpOverload, suggest_memory_format

_ATEN = torch.ops.aten
_GROUPED_MM = _ATEN._grouped_mm.default
_BAG_BACKWARD = _ATEN._embedding_bag_backward.default
_NORMALISED: Mapping[OpOverload, int] = {
    _ATEN.native_batch_norm.default: 0,
    _ATEN._native_batch_norm_legit.default: 0,
    _ATEN._native_batch_norm_legit.no_stats: 0,
    _ATEN._native_batch_norm_legit_functional.default: 0,
    _ATEN._native_batch_norm_legit_no_training.default: 0,
    _ATEN.native_batch_norm_backward.default: 1,
}
"""Operators whose first result is made like one of the arguments, by the argument's position."""
_VIEWS = frozenset({_ATEN.view.default, _ATEN._unsafe_view.default})
CANNOT_VIEW = (
    "view size is not compatible with input tensor's size and stride (at least one dimension spans across "
    "two contiguous subspaces). Use .reshape(...) instead."
)
"""How PyTorch says that a tensor's strides do not allow a view."""
_SETTLE_SIZES = frozenset(
    {
        _ATEN._fft_c2c.default,
        _ATEN._fft_c2r.default,
        _ATEN._fft_r2c.default,
        _ATEN.col2im.default,
        _ATEN.complex.default,
        _ATEN.constant_pad_nd.default,
        _ATEN.im2col.default,
        _ATEN.polar.default,
    }
)
"""Operators whose fakes make numbers of symbolic sizes, but for the kernels in Python."""


def fake_result(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, symbolic: bool, on_gpu: bool
) -> Any:
    """What an operator gives for fakes: of the sizes and strides that its kernel gives.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: the others.
        symbolic: whether sizes may be symbolic.
        on_gpu: whether the trace is for a GPU, though it is on the CPU.
    """
    if func is _GROUPED_MM and (args[0].device.type == "cpu" or args[0].dtype != torch.bfloat16):
        return _grouped_product(*args, **kwargs)
    if symbolic and func in INTERPOLATIONS and is_symbolic((tuple(args[0].shape), args[1])):
        return like_resized(args[0], args[1])
    if func is _BAG_BACKWARD:
        args = _with_map_to_bags(*args)
    with python_kernels() if symbolic and func in _SETTLE_SIZES else nullcontext():
        try:
            result = func(*args, **kwargs)
        except ValueError as error:
            if func not in _VIEWS:
                raise
            raise RuntimeError(CANNOT_VIEW) from error
    if on_gpu:
        return as_on_gpu(func, args, kwargs, result)
    position = _NORMALISED.get(func)
    if position is None or not isinstance(result[0], torch.Tensor) or args[position].device.type != "cpu":
        return result
    first, *others = result
    like = args[position]
    # The forward asks first whether its input is contiguous; with sizes of one it may be so in both formats.
    contiguous = position == 0 and like.is_contiguous()
    kept = torch.contiguous_format if contiguous else suggest_memory_format(like)
    return (torch.empty_like(first, memory_format=kept), *others)


def _with_map_to_bags(
    grad: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, bag_of: torch.Tensor, *others: Any
) -> tuple[Any, ...]:
    """The arguments of a bag's backward, with the map that its kernel makes where it gets an empty one."""
    return grad, indices, offsets, bag_of if bag_of.numel() else torch.empty_like(indices), *others


def _grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Shapes: (m, k) or (g, m, k) by (k, n) or (g, k, n); where there is no g, `offs` tells the groups."""
    rows, columns = a.size(-2), b.size(-1)
    in_groups = [a.size(0)] if a.dim() == 3 and b.dim() == 3 else []
    if a.dim() == 2 and b.dim() == 2 and offs is not None:
        in_groups = [offs.size(0)]
    dtype = out_dtype or a.dtype
    aligned = 16 // dtype.itemsize
    padded = (columns + aligned - 1) // aligned * aligned
    strides = [*([rows * padded] if in_groups else []), padded, 1]
    return torch.empty_strided((*in_groups, rows, columns), strides, dtype=dtype, device=a.device)
