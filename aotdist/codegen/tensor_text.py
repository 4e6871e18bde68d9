"""Tensors in few characters: `f32[8, 16]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def tensor_text(dtype: torch.dtype, size: Sequence[Any]) -> str:
    """A tensor of this dtype and size; sizes may be symbols."""
    return f"{_DTYPES.get(dtype) or str(dtype).removeprefix('torch.')}{list(size)}"
