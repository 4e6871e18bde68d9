"""Functions of Python's own record themselves when they are given numbers of a trace.

Such a number is read off a tensor, and differs from call to call: an optimizer's
(`aotdist.trace.numbers.scalars`), or any that depends on data (`aotdist.trace.numbers.unbacked`).
"""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from aotdist.torch_seam.patches import Patch

_MATH = (
    *("sqrt", "exp", "expm1", "log", "log2", "log10", "log1p", "pow", "fabs", "fmod", "copysign", "hypot"),
    *("isnan", "isinf", "isfinite"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "degrees", "radians"),
)
"""Functions of `math` that take floats, and compute with them without an operator."""


class Numbers(Protocol):
    """The numbers of a trace."""

    def is_traced(self, number: Any) -> bool:
        """Whether it is one of them."""
        ...

    def apply(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """What `function` computes of them."""
        ...


def functions_recorded(numbers: Numbers) -> AbstractContextManager[None]:
    """Functions that take some of `numbers` record themselves inside."""
    return _RECORDED.applied((numbers, *(_RECORDED.value or ())))


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        given: Sequence[Any] = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        of = next((of for of in _RECORDED.value or () if any(map(of.is_traced, given))), None)
        if of is None or kwargs or any(isinstance(one, torch.Tensor) for one in given):
            return function(*args, **kwargs)
        return of.apply(function, tuple(given))

    return recorded


_RECORDED = Patch[tuple[Numbers, ...]](
    "functions_of_numbers",
    lambda: [
        (module, name, _recorded(getattr(module, name)))
        for module, names in ((builtins, ("max", "min")), (math, _MATH))
        for name in names
    ],
)
