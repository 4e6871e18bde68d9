"""What counts as a constant: a Python value that an artifact is specialised on."""

from __future__ import annotations

import enum
import math
from typing import Any

import torch

_SCALARS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    slice,
    range,
)


def is_leaf(value: Any) -> bool:
    """What pytrees must not take apart: a `torch.Size` would come back as a plain tuple."""
    return type(value) is torch.Size


def is_constant(value: Any) -> bool:
    """Whether `value` is immutable data that can be compared: scalars, enums, tuples of such."""
    if isinstance(value, tuple) and type(value) is not torch.Size:
        return all(is_constant(item) for item in value)
    return isinstance(value, (*_SCALARS, enum.Enum))


def same_constant(a: Any, b: Any) -> bool:
    """Whether two constants are interchangeable: `1`, `1.0` and `True`, or zeros, are not.

    A NaN equals itself.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same_constant(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (slice, range)):
        return same_constant((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, complex):
        return same_constant(a.real, b.real) and same_constant(a.imag, b.imag)
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
    return bool(a == b) or (a != a and b != b)


def is_same(a: Any, b: Any) -> bool:
    """Whether two values are one object, or interchangeable constants."""
    return a is b or (is_constant(a) and is_constant(b) and same_constant(a, b))
