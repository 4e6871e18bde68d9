"""Checks of a tensor's data that PyTorch's own functions make, and that raise an error."""

# pyright: basic, reportPrivateUsage=false, reportPrivateImportUsage=false
from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch.distributions import constraints, distribution

from aotdist.torch_seam.patches import Patch

NoteCheck: TypeAlias = Callable[[type[Exception], torch.Tensor, Callable[[], object] | None], bool]
"""Takes error, condition and message, as `torch._check_tensor_all_with`; True if it handles the check."""

_check_now, _is_all_true_now = torch._check_tensor_all_with, torch._is_all_true
_any_now = torch.any
_NEGATIVE_VARIANCE = "var has negative entry/entries"
"""The message of `gaussian_nll_loss`."""


def intercept_checks(note: NoteCheck) -> AbstractContextManager[None]:
    """Checks of data in this thread go to `note`; PyTorch makes those that it does not handle.

    They are those of `torch._check_tensor_all`, `torch.distributions` (validation) and `gaussian_nll_loss`.
    """
    return _CHECKS.applied(note)


def gaussian_nll_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
    """`torch.nn.functional.gaussian_nll_loss`, whose check of variances goes to `note`, too."""
    note = _CHECKS.value
    with nullcontext() if note is None else _LOSS_CHECKS.applied(note):
        return torch.nn.functional.gaussian_nll_loss(*args, **kwargs)


check_all: Callable[[torch.Tensor, Callable[[], object]], None] = torch._check_tensor_all


def raise_check(error: type[Exception], message: str | None) -> None:
    """Raise what `torch._check_tensor_all_with` raises for a false condition."""
    say: Any = None if message is None else lambda: message
    torch._check_with(error, False, say)  # noqa: FBT003


def _tell_of_check(
    error_type: type[Exception], cond: torch.Tensor, message: Callable[[], object] | None = None
) -> None:
    note = _CHECKS.value
    is_condition = isinstance(cond, torch.Tensor) and cond.dtype == torch.bool
    if note is None or not is_condition or not note(error_type, cond, message):
        _check_now(error_type, cond, message)


def _tell_of_validation(valid: torch.Tensor) -> torch.Tensor | bool:
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


def _tell_of_negative_variance(*args: Any, **kwargs: Any) -> torch.Tensor | bool:
    note, frame = _LOSS_CHECKS.value, inspect.currentframe()
    asking = None if frame is None else frame.f_back
    is_loss = asking is not None and asking.f_code is torch.nn.functional.gaussian_nll_loss.__code__
    if note is not None and is_loss and note(ValueError, ~args[0], lambda: _NEGATIVE_VARIANCE):
        return False
    return _any_now(*args, **kwargs)


_CHECKS = Patch[NoteCheck](
    "check_hearers",
    lambda: [
        (torch, "_check_tensor_all_with", _tell_of_check),
        (torch, "_is_all_true", _tell_of_validation),
        (_definite, "check", _is_definite),
    ],
)
_LOSS_CHECKS = Patch[NoteCheck]("loss_check_hearers", lambda: [(torch, "any", _tell_of_negative_variance)])


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
    return _CHECKS_OF_NUMBERS.applied(require)


_check_number_now: Callable[..., None] = torch._check_with
_TORCH = torch.__file__.removesuffix("__init__.py")
_NO_MESSAGE = (
    "Expected cond to be True, but got False. (Could this error message be improved? If so, please report an "
    "enhancement request to PyTorch.)"
)
"""PyTorch's message for a check that has none."""


def _tell_of_number(
    error_type: type[Exception], cond: bool | torch.SymBool, message: Callable[[], object] | None
) -> None:
    require = _CHECKS_OF_NUMBERS.value
    if require is None or not isinstance(cond, torch.SymBool) or _is_made_by_pytorch():
        return _check_number_now(error_type, cond, message)
    text = _NO_MESSAGE if message is None else str(message())
    return require(error_type, lambda: _check_number_now(error_type, cond, message), text)


_CHECKS_OF_NUMBERS = Patch[Require]("number_check_hearers", lambda: [(torch, "_check_with", _tell_of_number)])


def _is_made_by_pytorch() -> bool:
    """Whether an operator of PyTorch's makes the check, not the program."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename in (__file__, torch.__file__):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TORCH)
