"""Checks of data in a program: whether all elements are true is known when the program has run.

`torch._check_tensor_all` makes them, and `torch.distributions`, whose parameters and values are validated.
So each is one more output, a single boolean, at which the compiled call looks before it returns. What the
program writes is written by then; eager raises where the check stands.
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
    """What is raised if an output is false.

    Args:
        error: the exception's name; it is one of Python's own.
        message: its text; None for PyTorch's.
    """

    error: str
    message: str | None


class Checks:
    """The checks that a program makes, in order.

    Attributes:
        made: what they raise.
        outs: for each a tensor of a single boolean.
    """

    def __init__(self) -> None:
        self.made: list[Check] = []
        self.outs: list[torch.Tensor] = []
        self._has_returned = False

    def note(
        self, error: type[Exception], condition: torch.Tensor, message: Callable[[], object] | None
    ) -> bool:
        """Note a check, if it can be made later on."""
        knows = getattr(builtins, error.__name__, None) is error
        if not knows or under_transform() or is_wrapper(condition) or is_real(condition):
            return False
        check = Check(error.__name__, None if message is None else str(message()))
        if self._has_returned:
            return check in self.made  # what a checkpoint computes again was checked before
        self.made.append(check)
        self.outs.append(condition.detach().all())
        return True

    def close(self) -> None:
        """The program has returned."""
        self._has_returned = True


def require(holds: torch.Tensor, check: Check) -> None:
    """Raise what the check says unless it holds."""
    if not holds.item():
        raise_check(getattr(builtins, check.error), check.message)
