"""What operators give on a GPU that is not there, in a trace on the CPU that is for it.

PyTorch's fakes know for most operators how dtypes, sizes and strides differ between devices: statistics of
layer norms are float32, Fourier transforms are laid out otherwise, buffers for a backward are empty. So each
operator is asked once more for fakes of a GPU, and what it answers is the result, as a fake of the CPU: a
build of PyTorch for CPUs has no autograd for others.

Which kernel convolves is asked of cuDNN, which is not there either; the rule for how its results lie is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aotdist.torch_seam.functional import FakeTensor, fake_on
from aotdist.torch_seam.operators import OpOverload, makes_views, suggest_memory_format, writes_arguments
from aotdist.torch_seam.trees import pytree

_ATEN = torch.ops.aten
_GPU = torch.device("cuda", 0)
_CONVOLUTIONS: Mapping[OpOverload, tuple[int, int]] = {
    _ATEN.convolution.default: (0, 1),
    _ATEN.convolution_backward.default: (1, 2),
}
"""Where input and weight are among the arguments."""
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def as_on_gpu(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """What an operator gives on a GPU.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: the others.
        result: what it gives on the CPU.
    """
    if func in _CONVOLUTIONS:
        first, second = _CONVOLUTIONS[func]
        return _convolved(args[first], args[second], result)
    if makes_views(func) or writes_arguments(func):
        return result
    try:
        there = func(*pytree.tree_map(_to_gpu, args), **pytree.tree_map(_to_gpu, dict(kwargs)))
    except (RuntimeError, AssertionError):  # a build for CPUs does not know (`geqrf`), so nobody does here
        return result
    return pytree.tree_map(_like, result, there)


def _to_gpu(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _GPU
    return fake_on(value, _GPU) if isinstance(value, FakeTensor) else value


def _like(here: Any, there: Any) -> Any:
    """A result as it is on the GPU; where nothing differs, it is the one of the CPU."""
    if not isinstance(here, torch.Tensor):
        return here
    if (here.dtype, here.shape, here.stride()) == (there.dtype, there.shape, there.stride()):
        return here
    return torch.empty_strided(there.shape, there.stride(), dtype=there.dtype, device=here.device)


def _convolved(inputs: torch.Tensor, weight: torch.Tensor, result: Any) -> Any:
    """Results of cuDNN have channels last where an input or the weight has, but for float64."""
    channels_last = _CHANNELS_LAST.get(inputs.dim())
    if channels_last is None:
        return result
    asked = any(suggest_memory_format(tensor) == channels_last for tensor in (inputs, weight))
    kept = channels_last if asked and inputs.dtype is not torch.float64 else torch.contiguous_format

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        is_of_bias = tensor.dim() == 1
        return tensor if is_of_bias else torch.empty_like(tensor, memory_format=kept)

    return pytree.tree_map_only(torch.Tensor, laid_out, result)
