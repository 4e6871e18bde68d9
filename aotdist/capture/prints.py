"""Calls of `print` and of loggers in a program: every call of the program repeats them.

There are no values while a program is captured. So calls of `print`, and of loggers by the user's code, are
noted; tensors among their arguments become outputs, and every call prints when it has run. Tensors are
printed with the values that they had at the `print`, and without their history (`grad_fn=`).
"""

from __future__ import annotations

import builtins
import logging
import warnings
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from aotdist.capture.code import is_users_code
from aotdist.capture.constants import is_constant
from aotdist.capture.effects import Print, Tree
from aotdist.capture.leaked_tensors import hides_traced, is_text_of_traced, refusal, text_of
from aotdist.errors import AotdistError
from aotdist.origins import code_behind, current_source_line, is_user_file
from aotdist.torch_seam.patches import Patch
from aotdist.torch_seam.symbols import SYMBOLIC


class Prints:
    """The prints of one trace, in order.

    Args:
        existing: identities of objects that were there before the call.

    Attributes:
        made: the calls that were noted, with the tensors of the trace that they are given.
    """

    def __init__(self, existing: Collection[int]) -> None:
        self._existing = existing
        self.made: list[Print] = []

    def noting(self) -> AbstractContextManager[None]:
        """A context in which this thread's prints are noted instead of printed."""
        return _PRINTS.applied(self)

    def note(self, file: Any, given: Any, logger: Any = None) -> None:
        """Note a call; for the arguments see `Print`.

        Raises:
            UnsupportedProgram: an object among the arguments hides tensors of the program.
        """
        given = Tree.of(given)
        if any(map(is_text_of_traced, given.leaves)):
            warnings.warn(
                "aotdist: a text of a tensor is printed, which every call prints without values; give "
                f"`print` the tensor or number itself (`print('loss', loss)`), at {current_source_line()}",
                stacklevel=3,
            )
        self.made.append(Print(file, given.map(self._as_it_is), logger))

    def _as_it_is(self, leaf: Any) -> Any:
        """A copy of a leaf, which later writes do not change; the text of an object."""
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone()
        if is_constant(leaf) or isinstance(leaf, SYMBOLIC):
            return leaf
        if hides_traced(leaf, self._existing):
            raise refusal(
                f"a {type(leaf).__name__} is printed that holds tensors which the program computes",
                "print the tensors themselves",
            )
        return str(leaf)

    def fail(self, error: BaseException) -> None:
        """Attach the noted prints to `error`, which the program has raised, for `made_before`."""
        if self.made:
            prints = [replace(each, given=each.given.map(_without_value)) for each in self.made]
            setattr(error, _MADE_BEFORE, prints)


def _without_value(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return text_of(leaf)
    return "<a number that is read off a tensor>" if isinstance(leaf, SYMBOLIC) else leaf


def made_before(error: BaseException) -> None:
    """Print what a program printed before it raised an error of its own; without values."""
    if not isinstance(error, AotdistError):
        for each in vars(error).pop(_MADE_BEFORE, ()):
            each.make(each.given.value())


_MADE_BEFORE = "_aotdist_prints"


def _noted_print(*args: Any, file: Any = None, **kwargs: Any) -> None:
    prints = _PRINTS.value
    if prints is None or (code := code_behind(1)) is None or not is_user_file(code.co_filename):
        _PRINTS.original(builtins, "print")(*args, file=file, **kwargs)
    else:
        prints.note(file, (args, kwargs))


def _noted_log(
    self: logging.Logger,
    level: int,
    msg: object,
    args: Any,
    exc_info: Any = None,
    extra: Any = None,
    stack_info: bool = False,
    stacklevel: int = 1,
) -> None:
    prints = _PRINTS.value
    code = code_behind(2)  # the caller of the logger's method; what libraries log is not repeated
    if prints is None or exc_info or stack_info or code is None or not is_users_code(code):
        log = _PRINTS.original(logging.Logger, "_log")
        log(self, level, msg, args, exc_info, extra, stack_info, stacklevel)
    else:
        place = self.findCaller(False, stacklevel + 1)[:3]
        prints.note(None, (msg, args, extra), (self, level, *place))


_PRINTS = Patch[Prints](
    "prints_noted", lambda: [(builtins, "print", _noted_print), (logging.Logger, "_log", _noted_log)]
)
