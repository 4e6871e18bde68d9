"""Checks of a tensor's data that PyTorch's own functions make, and that raise an error."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

import torch
from torch.distributions import constraints, distribution

from aotdist.torch_seam import patches
from aotdist.torch_seam.patches import all_replaced_here, caller_of_replaced, replaced_here

NoteCheck: TypeAlias = Callable[[type[Exception], torch.Tensor, Callable[[], object] | None], bool]
"""Takes error, condition and message, as `torch._check_tensor_all_with`; True if it handles the check."""

_definite: Any = type(constraints.positive_definite)


def intercept_checks(note: NoteCheck) -> AbstractContextManager[None]:
    """Checks of data in this thread go to `note`; PyTorch makes those that it does not handle.

    They are those of `torch._check_tensor_all` and of the validation in `torch.distributions`.
    """

    def check(check_now: Callable[..., None], error_type: Any, cond: Any, message: Any = None) -> None:
        is_condition = isinstance(cond, torch.Tensor) and cond.dtype == torch.bool
        if not is_condition or not note(error_type, cond, message):
            check_now(error_type, cond, message)

    def is_all_true(is_now: Callable[..., Any], valid: torch.Tensor) -> torch.Tensor | bool:
        asking = caller_of_replaced()
        is_validation = asking.f_globals is vars(distribution)
        if is_validation and note(ValueError, valid, functools.partial(_invalid, asking)):
            return True
        return is_now(valid)

    return all_replaced_here(
        (torch, "_check_tensor_all_with", check),
        (torch, "_is_all_true", is_all_true),
        (_definite, "check", _is_definite),
    )


def check_all(error: type[Exception], condition: torch.Tensor, message: str) -> None:
    """Raise `error` unless all elements of `condition` are true; `intercept_checks` sees the check."""
    torch._check_tensor_all_with(error, condition, lambda: message)


def raise_check(error: type[Exception], message: str | None) -> None:
    """Raise what `torch._check_tensor_all_with` raises for a false condition."""
    say: Any = None if message is None else lambda: message
    torch._check_with(error, False, say)  # noqa: FBT003


def _is_definite(check: Any, constraint: Any, value: torch.Tensor) -> torch.Tensor:
    """Whether matrices are positive definite; PyTorch's own check branches on whether they are symmetric."""
    return constraints.symmetric.check(value) & torch.linalg.cholesky_ex(value).info.eq(0)


def _invalid(asking: types.FrameType) -> str:
    """A distribution's message for invalid parameters or values, without these, which are traced."""
    found = asking.f_locals
    kind, value = type(found["self"]).__name__, found["value"]
    of_shape = f"(Tensor of shape {tuple(value.shape)})"
    if "param" in found:
        demand = f"of distribution {kind} to satisfy the constraint {found['constraint']!r}"
        return f"Expected parameter {found['param']} {of_shape} {demand}, but found invalid values"
    demand = f"to be within the support ({found['support']!r}) of the distribution {kind}"
    return f"Expected value argument {of_shape} {demand}, but found invalid values"


Require: TypeAlias = Callable[[type[Exception], Callable[[], None], str], None]
"""Takes a check of a symbolic number: the error, what registers the check with PyTorch, and the message."""


def intercept_checks_of_numbers(require: Require) -> AbstractContextManager[None]:
    """A program's checks of symbolic numbers in this thread (`torch._check`) go to `require`."""

    def check(original: Callable[..., None], error_type: Any, cond: Any, message: Any) -> None:
        if not isinstance(cond, torch.SymBool) or _is_made_by_pytorch():
            return original(error_type, cond, message)
        text = _NO_MESSAGE if message is None else str(message())
        return require(error_type, lambda: original(error_type, cond, message), text)

    return replaced_here(torch, "_check_with", check)


_TORCH = torch.__file__.removesuffix("__init__.py")
_NO_MESSAGE = (
    "Expected cond to be True, but got False. (Could this error message be improved? If so, please report an "
    "enhancement request to PyTorch.)"
)
"""PyTorch's message for a check that has none."""


def _is_made_by_pytorch() -> bool:
    """Whether an operator of PyTorch's makes the check, not the program."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename in (__file__, patches.__file__, torch.__file__):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)
