"""Tracebacks as the user needs them: their own frames, those of `torch.nn`, and one of ours.

Between the user's call and the line of theirs that fails, PyTorch and aotdist put some forty frames while a
program is captured. With `AOTDIST_TRACEBACK=full` all of them are shown.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

from aotdist.capture.origins import is_user_file
from aotdist.errors import AotdistError, InternalError
from aotdist.settings import shows_all_frames

E = TypeVar("E", bound=BaseException)
P = ParamSpec("P")
R = TypeVar("R")

_NOTE = "(frames of PyTorch and aotdist are left out; AOTDIST_TRACEBACK=full shows them)"
_KERNELS = "_aotdist_is_of_a_kernel"
_LAYERS = os.path.join(os.path.dirname(torch.__file__), "nn") + os.sep
_CALLING = (os.path.join(_LAYERS, "modules", "module.py"), os.path.join(_LAYERS, "parallel") + os.sep)
_PYTHONS = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib")})


def note_kernels(error: BaseException) -> None:
    """Note that a kernel raises `error` in eager, too: none of the frames on its way tells more."""
    setattr(error, _KERNELS, True)


def shortened(error: E) -> E:
    """`error`, to be raised to the user, without the frames between theirs.

    What our errors were made of is left out. Errors of ours that are bugs, and errors in which no line of the
    user's, of `torch.nn` or of a graph that was printed has part, keep all frames.
    """
    if shows_all_frames() or isinstance(error, InternalError):
        return error
    found = _only(error.__traceback__, _is_shown) or _only(error.__traceback__, _is_printed)
    if found is None and isinstance(error, AotdistError) and error.__cause__ is not None:
        found = _only(error.__cause__.__traceback__, _is_shown)  # the lines that led to what was refused
    if found is None and not isinstance(error, AotdistError) and not hasattr(error, _KERNELS):
        return error
    if isinstance(error, AotdistError):
        error.__cause__ = None
        error.__suppress_context__ = True
    else:
        _shorten_chain(error)
    if _NOTE not in getattr(error, "__notes__", ()):
        error.add_note(_NOTE)
    return error.with_traceback(found)


def _shorten_chain(error: BaseException) -> None:
    """Shorten what an exception of the user's was raised from, without what only we handled on the way."""
    met = {id(error)}
    while (before := error.__cause__ or error.__context__) is not None and id(before) not in met:
        found = _only(before.__traceback__, _is_shown)
        if isinstance(before, AotdistError) or found is None:
            error.__cause__ = error.__context__ = None
            return
        met.add(id(before))
        before.__traceback__ = found
        error = before


def _only(traceback: TracebackType | None, is_shown: Callable[[str], bool]) -> TracebackType | None:
    """A traceback of the frames in some files; None if there is none."""
    shown: list[TracebackType] = []
    while traceback is not None:
        if is_shown(traceback.tb_frame.f_code.co_filename):
            shown.append(traceback)
        traceback = traceback.tb_next
    found: TracebackType | None = None
    for one in reversed(shown):
        found = TracebackType(found, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return found


def _is_shown(filename: str) -> bool:
    if filename.startswith(_LAYERS):
        return not filename.startswith(_CALLING)
    is_of_python = filename.startswith(_PYTHONS) and not filename.startswith(_INSTALLED)
    return is_user_file(filename) and not is_of_python


def _is_printed(filename: str) -> bool:
    return filename.startswith("<aotdist ")


def short_tracebacks(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose errors are shown as the user needs them: see `shortened`."""

    @functools.wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise shortened(error)  # noqa: B904  # the same one

    return entered
