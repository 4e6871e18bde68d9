"""Constants: Python values that an artifact is specialised on; and arguments that cannot be read."""

from __future__ import annotations

import enum
import math
from typing import Any

import torch

from aotdist.errors import UnsupportedProgram

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
    enum.Enum,
)


def is_leaf(value: Any) -> bool:
    """Whether pytrees must not flatten a value: a `torch.Size` would become a plain tuple."""
    return type(value) is torch.Size


def is_constant(value: Any) -> bool:
    """Whether `value` is immutable data that can be compared: scalars, enums, tuples of such."""
    if isinstance(value, tuple) and type(value) is not torch.Size:
        return all(map(is_constant, value))
    return isinstance(value, _SCALARS)


def is_number(value: Any) -> bool:
    """Whether it is an `int` or a `float`; NumPy's double, which computes as Python's, is one."""
    return type(value) in (int, float) or (isinstance(value, float) and type(value).__module__ == "numpy")


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


class OpaqueArgument:
    """Stands in the trace for an iterator, a lock or a numpy array in an argument.

    Any use of it raises an error, except for `is None`.

    Args:
        path: its place, as the user would write it.
        kind: the name of its class.
    """

    def __init__(self, path: str, kind: str) -> None:
        object.__setattr__(self, "_says", (path, kind))

    def __getattribute__(self, name: str) -> Any:
        path, kind = object.__getattribute__(self, "_says")
        raise UnsupportedProgram(
            f"`{path}` is a {kind}, which is neither a tensor nor a constant, and the program reads it",
            stage="capture",
            fix="read it before the call, and pass what it says",
        )

    def _refuse(self, *_: Any) -> Any:
        return self.anything

    __bool__ = __len__ = __iter__ = __next__ = __call__ = __getitem__ = __eq__ = _refuse
    __enter__ = __exit__ = __hash__ = __contains__ = __setattr__ = __add__ = __mul__ = _refuse


def is_unreadable(value: Any) -> bool:
    """Whether `value` is an `OpaqueArgument`; `isinstance` would raise, as it asks for the class."""
    return type(value) is OpaqueArgument
