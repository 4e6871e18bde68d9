"""Checks of data in a program: whether all elements are true is known when the program has run.

`torch._check_tensor_all` makes them, and so does the validation of parameters and values in
`torch.distributions`. Each is one more output, a single boolean, which the compiled call reads before it
returns. By then the program's writes are done, where eager raises at the check.
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
        """Note a check; False if it cannot be made after the program has run."""
        knows = getattr(builtins, error.__name__, None) is error
        if not knows or under_transform() or is_wrapper(condition) or is_real(condition):
            return False
        check = Check(error.__name__, None if message is None else str(message()))
        if self._has_returned:
            return check in self.made  # a checkpoint that recomputes repeats checks of the forward
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
