"""Calls of attention, and kernels of GPUs for the CPU: what they compute, by the formula, and how it lies."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

FLASH, EFFICIENT = "aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_efficient_attention"
BF16, FP32 = torch.bfloat16, torch.float32


def heads(dtype: torch.dtype, dim: int = 16, key_heads: int = 4) -> list[Tensor]:
    """Shapes: (batch, heads, rows, dim) of query, key and value, in memory (batch, rows, heads, dim)."""
    sizes = ((2, 8, heads, dim) for heads in (4, key_heads, key_heads))
    return [torch.randn(size, dtype=dtype).transpose(1, 2).requires_grad_() for size in sizes]


MASK = torch.ones(8, 8, dtype=torch.bool).tril()
CHOICES: dict[str, tuple[str | None, torch.dtype, dict[str, int], dict[str, Any]]] = {
    "half": (FLASH, BF16, {}, {}),
    "causal": (FLASH, BF16, {}, {"is_causal": True, "scale": 0.5}),
    "single": (EFFICIENT, FP32, {}, {}),
    "a mask": (EFFICIENT, BF16, {}, {"attn_mask": MASK}),
    "a mask to add": (EFFICIENT, FP32, {}, {"attn_mask": torch.randn(2, 1, 8, 8)}),
    "a mask in rows of no multiple of 8": (EFFICIENT, FP32, {}, {"attn_mask": torch.randn(8, 9)[:, :8]}),
    "shared keys": (FLASH, BF16, {"key_heads": 2}, {"enable_gqa": True}),
    "shared keys, single": (EFFICIENT, FP32, {"key_heads": 2}, {"enable_gqa": True}),
    "heads that are filled up": (FLASH, BF16, {"dim": 12}, {"is_causal": True}),
    "heads that no kernel takes": (None, FP32, {"dim": 3}, {}),
    "long heads": (EFFICIENT, BF16, {"dim": 264}, {}),
    "double": (None, torch.float64, {}, {}),
}
"""Calls: the kernel that is chosen (None: the formula), dtype, sizes, and options."""


def _weights(query: Tensor, key: Tensor, bias: Tensor | None, is_causal: bool, scale: float | None) -> Tensor:
    products = query.float() @ key.float().mT * (scale or 1 / math.sqrt(query.size(-1)))
    if is_causal:
        products = products.masked_fill(torch.ones_like(products, dtype=torch.bool).triu(1), -math.inf)
    return torch.softmax(products if bias is None else products + bias, -1)


def _shared(query: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [tensor.repeat_interleave(query.size(1) // tensor.size(1), 1) for tensor in tensors]


def _forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    key, value = _shared(query, key, value)
    return (_weights(query, key, bias, *options) @ value.float()).to(query.dtype)


def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *options: Any
) -> tuple[Tensor, ...]:
    scale = options[1] or 1 / math.sqrt(query.size(-1))
    all_keys, all_values = _shared(query, key, value)
    weights = _weights(query, all_keys, bias, *options)
    of_weights = grad.float() @ all_values.float().mT
    of_products = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    grads = of_products @ all_keys.float(), of_products.mT @ query.float(), weights.mT @ grad.float()
    scales = scale, scale, 1.0
    return tuple(
        (made * factor).unflatten(1, (like.size(1), -1)).sum(2).to(like.dtype)
        for made, factor, like in zip(grads, scales, (query, key, value), strict=True)
    )


def _by_rows(tensor: Tensor) -> Tensor:
    """Shape: (batch, heads, rows, dim), in memory (batch, rows, heads, dim)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    debug: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    assert dropout == 0 and not debug and query.dtype in (torch.float16, torch.bfloat16)
    result = torch.empty_like(query).copy_(_forward(query, key, value, None, is_causal, scale))
    sums, lengths = query.new_zeros(query.shape[:3], dtype=torch.float32), (query.size(2), key.size(2))
    seeds = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
    return result, sums, None, None, *lengths, *seeds, query.new_empty(0)


def _flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float | None = None
) -> tuple[Tensor, ...]:
    made = _backward(grad, query, key, value, None, rest[7], scale)
    return tuple(torch.empty_like(like).copy_(x) for like, x in zip((query, key, value), made, strict=True))


def _efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    keeps: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    assert dropout == 0 and query.size(1) == key.size(1)
    assert bias is None or all(stride % 8 == 0 for stride in bias.stride()[:-1])
    rows = math.ceil(query.size(2) / 32) * 32 if keeps else 0
    sums = query.new_zeros((*query.shape[:2], rows), dtype=torch.float32)
    seeds = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    return _by_rows(_forward(query, key, value, bias, is_causal, scale)), sums, *seeds


def _efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    *rest: Any,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    is_causal = rest[6] if len(rest) > 6 else False
    return *map(_by_rows, _backward(grad, query, key, value, bias, is_causal, scale)), None


def kernels_for_attention() -> torch.library.Library:
    """Lets the CPU run them, as long as what is returned is there."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in {"flash": _flash, "efficient": _efficient}.items():
        library.impl(f"_scaled_dot_product_{name}_attention", kernel, "CPU")
    for name, kernel in {"flash": _flash_backward, "efficient": _efficient_backward}.items():
        library.impl(f"_scaled_dot_product_{name}_attention_backward", kernel, "CPU")
    return library
