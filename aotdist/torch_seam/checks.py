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
from aotdist.torch_seam.patches import Patch, replaced_here

NoteCheck: TypeAlias = Callable[[type[Exception], torch.Tensor, Callable[[], object] | None], bool]
"""Takes error, condition and message, as `torch._check_tensor_all_with`; True if it handles the check."""

_check_now, _is_all_true_now = torch._check_tensor_all_with, torch._is_all_true


def intercept_checks(note: NoteCheck) -> AbstractContextManager[None]:
    """Checks of data in this thread go to `note`; PyTorch makes those that it does not handle.

    They are those of `torch._check_tensor_all` and of the validation in `torch.distributions`.
    """
    return _CHECKS.applied(note)


def check_all(error: type[Exception], condition: torch.Tensor, message: str) -> None:
    """Raise `error` unless all elements of `condition` are true; `intercept_checks` sees the check."""
    torch._check_tensor_all_with(error, condition, lambda: message)


def raise_check(error: type[Exception], message: str | None) -> None:
    """Raise what `torch._check_tensor_all_with` raises for a false condition."""
    say: Any = None if message is None else lambda: message
    torch._check_with(error, False, say)  # noqa: FBT003


def _note_check(
    error_type: type[Exception], cond: torch.Tensor, message: Callable[[], object] | None = None
) -> None:
    note = _CHECKS.value
    is_condition = isinstance(cond, torch.Tensor) and cond.dtype == torch.bool
    if note is None or not is_condition or not note(error_type, cond, message):
        _check_now(error_type, cond, message)


def _note_validation(valid: torch.Tensor) -> torch.Tensor | bool:
    note, frame = _CHECKS.value, inspect.currentframe()
    asking = None if frame is None else frame.f_back
    if note is None or asking is None or asking.f_globals is not vars(distribution):
        return _is_all_true_now(valid)
    return note(ValueError, valid, functools.partial(_invalid, asking)) or _is_all_true_now(valid)


_definite: Any = type(constraints.positive_definite)
_is_definite_now = _definite.check


def _is_definite(constraint: Any, value: torch.Tensor) -> torch.Tensor:
    """Whether matrices are positive definite; PyTorch's own check branches on whether they are symmetric."""
    if _CHECKS.value is None:
        return _is_definite_now(constraint, value)
    return constraints.symmetric.check(value) & torch.linalg.cholesky_ex(value).info.eq(0)


_CHECKS = Patch[NoteCheck](
    "check_hearers",
    lambda: [
        (torch, "_check_tensor_all_with", _note_check),
        (torch, "_is_all_true", _note_validation),
        (_definite, "check", _is_definite),
    ],
)


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
