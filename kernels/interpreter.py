"""Makes Triton's interpreter round as a GPU does.

It computes bfloat16 and float8 on their raw bits. Here their values are widened to float32 before anything
is done to them, and rounded to the nearest when they are stored; float8 saturates, as the instruction does.
Reductions by functions of ours, which it would run element by element, run in NumPy. Blocks of one element
can be bounds of loops.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

_BITS = {"bf16": np.int16, "fp8e4nv": np.uint8, "fp8e5": np.uint8}
_TORCH = {"bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
_REDUCTIONS = {"greater": np.max, "less": np.min, "product": np.prod}


@functools.cache
def repair() -> None:
    """Patch the interpreter, once."""
    from triton.runtime import interpreter

    _repair_casts(interpreter)
    _repair_reductions(interpreter)
    _repair_numbers(interpreter)
    execute = interpreter.GridExecutor.__call__

    def quietly(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):  # a kernel also computes elements that it masks, as on a GPU
            return execute(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = quietly


def widened(bits: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """The float32 values of raw bits of a narrow dtype."""
    raw = torch.from_numpy(np.ascontiguousarray(bits).view(_BITS[dtype.name]).copy())
    return raw.view(_TORCH[dtype.name]).float().numpy().reshape(bits.shape)


def narrowed(values: np.ndarray[Any, Any], dtype: Any) -> np.ndarray[Any, Any]:
    """The raw bits of float32 values, rounded to the nearest; float8 saturates."""
    exact = torch.from_numpy(np.array(values, dtype=np.float32))
    narrow = _TORCH[dtype.name]
    if narrow is not torch.bfloat16:
        largest = torch.finfo(narrow).max
        exact = torch.where(exact.isnan(), exact, exact.clamp(-largest, largest))
    bits = exact.to(narrow).view(torch.int16 if narrow is torch.bfloat16 else torch.uint8).numpy()
    return bits.view(np.uint16 if narrow is torch.bfloat16 else np.uint8).reshape(np.shape(values))


def _is_narrow(dtype: Any) -> bool:
    return dtype.scalar.name in _TORCH


def _repair_casts(interpreter: Any) -> None:
    import triton.language as tl

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast = builder.cast_impl

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if _is_narrow(source.dtype):
            source = handle(widened(source.data, source.dtype.scalar), tl.float32)
        if _is_narrow(target):
            return handle(narrowed(source.data.astype(np.float32), target.scalar), target.scalar)
        return cast(self, source, target)

    def fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        return cast_impl(self, source, target)

    compute = builder.binary_op

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        """The result of a comparison is `int1`; the interpreter gives it the dtype of the operands."""
        result = compute(self, left, right, op)
        return handle(result.data, tl.int1) if result.data.dtype == np.bool_ else result

    builder.binary_op = binary_op
    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = fp_to_fp
    for name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc"):
        setattr(builder, f"create_{name}", cast_impl)


def _repair_numbers(interpreter: Any) -> None:
    """Let blocks of one element be numbers: Triton 3.6 asks NumPy, which from 2.4 on wants no dimensions."""
    patch_tensor = interpreter._patch_lang_tensor

    def as_number(block: Any) -> int:
        return int(block.handle.data.item())

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", as_number)

    interpreter._patch_lang_tensor = patched


def _repair_reductions(interpreter: Any) -> None:
    reductions = interpreter.ReduceOps
    apply_impl = reductions.apply_impl

    def apply(self: Any, inputs: Any) -> Any:
        in_numpy = _REDUCTIONS.get(getattr(getattr(self.combine_fn, "fn", None), "__name__", ""))
        if in_numpy is None or len(inputs) != 1:
            return apply_impl(self, inputs)
        values = inputs[0]
        return self.to_tensor(
            in_numpy(values.handle.data, axis=self.axis, keepdims=self.keep_dims), values.dtype
        )

    reductions.apply_impl = apply
