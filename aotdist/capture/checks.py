"""Checks that all elements of a tensor are true, made when the program has run.

`torch._check_tensor_all` makes such checks, and so does the validation of parameters and values in
`torch.distributions`. Each becomes one more output, a single boolean, which the compiled call reads before it
returns. By then the program's writes are done; eager raises at the check.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass

import torch

from aotdist.subclasses.protocol import is_real, is_wrapper
from aotdist.torch_seam.checks import raise_check
from aotdist.torch_seam.modes import under_transform


@dataclass(frozen=True, slots=True)
class Check:
    """The error to raise if an output is false.

    Args:
        error: the name of the exception, a built-in one.
        message: its text; None for PyTorch's.
    """

    error: str
    message: str | None


class Checks:
    """The checks that a program makes, in order.

    Attributes:
        made: the checks.
        outs: for each a tensor of a single boolean.
    """

    def __init__(self) -> None:
        self.made: list[Check] = []
        self.outs: list[torch.Tensor] = []
        self._has_returned = False

    def note(
        self, error: type[Exception], condition: torch.Tensor, message: Callable[[], object] | None
    ) -> bool:
        """Note a check; False if it cannot be made after the program has run."""
        is_built_in = getattr(builtins, error.__name__, None) is error
        if not is_built_in or under_transform() or is_wrapper(condition) or is_real(condition):
            return False
        check = Check(error.__name__, None if message is None else str(message()))
        if self._has_returned:
            return check in self.made  # a checkpoint that recomputes repeats checks of the forward
        self.made.append(check)
        self.outs.append(condition.detach().all())
        return True

    def close(self) -> None:
        """Note that the program has returned."""
        self._has_returned = True


def require(holds: torch.Tensor, check: Check) -> None:
    """Raise the error of a check unless it holds."""
    if not holds.item():
        raise_check(getattr(builtins, check.error), check.message)
