"""The attention kernels of the GPUs that a program is traced for, on a machine without a GPU.

On each device, `scaled_dot_product_attention` calls the first of its kernels that takes the arguments: on
NVIDIA's GPUs flash attention, memory-efficient attention, or else the formula; cuDNN's, which PyTorch puts
first on some, if the program says so. A trace on the CPU would choose for the CPU. The conditions here are
those of PyTorch's `sdp_utils.cpp` (releases 2.11 to 2.14) for GPUs from sm_80, or narrower where releases
differ: a kernel that is called here runs there. For GPUs of AMD it is the formula.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from aotdist.torch_seam.ambient import attention_kernels
from aotdist.torch_seam.patches import replaced_here
from aotdist.trace.failures import refusal

_ATEN = torch.ops.aten
_CHOSEN_BY_DEVICE = functional.scaled_dot_product_attention
_HALF = (torch.float16, torch.bfloat16)
_DIM_OF_FLASH = 256
_DIM_OF_CUDNN = 128
"""The largest heads that kernels take; newer releases of cuDNN take larger ones."""


class _Call(NamedTuple):
    """The arguments of `scaled_dot_product_attention`.

    Shapes: query (batch, heads, queries, dim), key and value (batch, heads, keys, dim), and a mask of as many
    dimensions as broadcast to (batch, heads, queries, keys).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def keeps_sums(self) -> bool:
        """Whether a backward may ask for the sums of exponentials."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    def bias(self, instead_of_none: float) -> Tensor | None:
        """What is added to the products; for a boolean mask, `instead_of_none` where it is false."""
        mask = self.attn_mask
        if mask is None or mask.dtype is not torch.bool:
            return mask
        return torch.where(
            mask, 0.0, torch.full((), instead_of_none, dtype=self.query.dtype, device=mask.device)
        )


def instead(target: str) -> Mapping[Any, Callable[..., Tensor]]:
    """What is called for attention in a trace for a generation of GPUs (`sm_90`)."""
    return {_CHOSEN_BY_DEVICE: functools.partial(_attention, target)}


def chosen_for(target: str | None) -> AbstractContextManager[Any]:
    """The same for calls that no mode sees: in PyTorch's own layers, and in backwards that recompute."""
    if target is None:
        return nullcontext()

    def chosen(_: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return _attention(target, *args, **kwargs)

    return replaced_here(functional, _CHOSEN_BY_DEVICE.__name__, chosen)


def _attention(target: str, *args: Any, **kwargs: Any) -> Tensor:
    call, kernels = _Call(*args, **kwargs), attention_kernels()
    are_known = target.startswith("sm_") and _is_regular(call)
    for kernel in kernels:
        if kernel == SDPBackend.MATH:
            break
        takes, run = _KERNELS[kernel]
        if are_known and takes(call):
            return run(call)
    else:
        raise refusal(
            f"no kernel for attention that `sdpa_kernel` allows takes these arguments on {target}",
            "allow another one, or `SDPBackend.MATH`",
        )
    with sdpa_kernel(SDPBackend.MATH):
        return _CHOSEN_BY_DEVICE(*args, **kwargs)


def _is_regular(call: _Call) -> bool:
    """Whether all kernels but the formula may take the arguments."""
    query, key, value = call.tensors
    if {tensor.dim() for tensor in call.tensors} != {4} or len({t.dtype for t in call.tensors}) > 1:
        return False
    heads, key_heads = query.size(1), key.size(1)
    return (
        query.size(0) == key.size(0) == value.size(0)
        and key_heads == value.size(1)
        and (heads == key_heads or (call.enable_gqa and key_heads > 0 and heads % key_heads == 0))
        and key.size(2) == value.size(2)
        and 0 not in (tensor.numel() for tensor in call.tensors)
        and query.size(3) == key.size(3)
        and all(tensor.stride(3) == 1 for tensor in call.tensors)
        and (call.attn_mask is None or _is_regular_mask(call.attn_mask, call))
    )


def _is_regular_mask(mask: Tensor, call: _Call) -> bool:
    query, key, _ = call.tensors
    sizes = (*query.shape[:3], key.size(2))
    fits = mask.dim() in (2, 3, 4) and all(
        size in (1, whole) for size, whole in zip(reversed(mask.shape), reversed(sizes), strict=False)
    )
    return fits and mask.dtype in (torch.bool, query.dtype) and mask.stride(-1) == 1 and not call.is_causal


def _cudnn_takes(call: _Call) -> bool:
    query, key, _ = call.tensors
    mask = call.attn_mask
    return (
        query.dtype in _HALF
        and all(tensor.size(3) <= _DIM_OF_CUDNN and tensor.size(3) % 8 == 0 for tensor in call.tensors)
        and key.size(2) > 1
        and (call.dropout_p == 0 or query.size(2) > 1)
        and call.dropout_p * 16 == math.floor(call.dropout_p * 16)
        and (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad))
        and not torch.are_deterministic_algorithms_enabled()
        and max(query.shape[:2]) <= 65535
    )


def _cudnn(call: _Call) -> Tensor:
    # Minus infinity makes NaN in cuDNN; eager takes the least number of float16 as well.
    bias = call.bias(-65504.0)
    run = _ATEN._scaled_dot_product_cudnn_attention.default
    dropped = call.dropout_p, call.is_causal, False
    return run(*call.tensors, bias, call.keeps_sums, *dropped, scale=call.scale)[0]


def _flash_takes(call: _Call) -> bool:
    query, key, value = call.tensors
    return (
        query.dtype in _HALF
        and call.attn_mask is None
        and query.size(3) == value.size(3) <= _DIM_OF_FLASH
        and (not call.is_causal or query.size(2) == key.size(2))
    )


def _flash(call: _Call) -> Tensor:
    """The kernel takes heads of multiples of 8: they are filled up with zeros."""
    dim = call.query.size(3)
    scale = 1 / math.sqrt(dim) if call.scale is None else call.scale
    padded = [functional.pad(each, (0, -dim % 8)) if dim % 8 else each for each in call.tensors]
    run = _ATEN._scaled_dot_product_flash_attention.default
    result = run(*padded, call.dropout_p, call.is_causal, False, scale=scale)[0]
    return result[..., :dim] if dim % 8 else result


def _efficient_takes(call: _Call) -> bool:
    query, _, value = call.tensors
    aligned = 16 // query.dtype.itemsize
    return (
        query.dtype in (*_HALF, torch.float32)
        and query.size(3) % aligned == value.size(3) % aligned == 0
        and not any(tensor.storage_offset() % aligned for tensor in call.tensors)
    )


def _efficient(call: _Call) -> Tensor:
    """Heads that share a key have copies of it, as the formula has: the backward's fake knows no others."""
    query, key, value = call.tensors
    shared = query.size(1) // key.size(1)
    if shared > 1:
        key, value = (each.repeat_interleave(shared, 1) for each in (key, value))
    bias = call.bias(-math.inf)
    if bias is not None:
        bias = _in_aligned_rows(bias).expand(query.size(0), query.size(1), query.size(2), key.size(2))
    run = _ATEN._scaled_dot_product_efficient_attention.default
    dropped = call.dropout_p, call.is_causal
    return run(query, key, value, bias, call.keeps_sums, *dropped, scale=call.scale)[0]


def _in_aligned_rows(bias: Tensor) -> Tensor:
    """The same numbers, in rows that begin at multiples of 8 elements, as the kernel reads them."""
    if all(stride % 8 == 0 for stride in bias.stride()[:-1]):
        return bias
    columns = bias.size(-1)
    return functional.pad(bias, (0, 8 - columns % 8))[..., :columns]


_KERNELS: Mapping[SDPBackend, tuple[Callable[[_Call], bool], Callable[[_Call], Tensor]]] = {
    SDPBackend.CUDNN_ATTENTION: (_cudnn_takes, _cudnn),
    SDPBackend.FLASH_ATTENTION: (_flash_takes, _flash),
    SDPBackend.EFFICIENT_ATTENTION: (_efficient_takes, _efficient),
}
