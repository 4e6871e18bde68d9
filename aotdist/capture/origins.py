"""Which line of the user's program an operation, or an error, comes from."""

from __future__ import annotations

import inspect
import linecache
import os
import re
from types import CodeType, FrameType, TracebackType

import torch

from aotdist import program
from aotdist.capture.annotations import current_line

_TORCH = os.path.dirname(torch.__file__) + os.sep
_TORCH_MODULES = os.path.join(_TORCH, "nn") + os.sep
_OURS = os.path.dirname(program.__file__) + os.sep
# The trainer that ships with aotdist is a user like any other: its lines are worth showing. Commands are not.
_EXAMPLES = os.path.join(_OURS, "launch") + os.sep
_COMMANDS = os.path.join(_EXAMPLES, "commands") + os.sep
_LIBRARIES = ("torch.nn.", "torch.optim.swa_utils", "transformers.")
"""Where modules are from that may choose by data: the user cannot write them otherwise."""
_SYMBOLS = (
    os.path.join(_TORCH, "__init__.py"),
    os.path.join(_TORCH, "fx", "experimental") + os.sep,
    os.path.join(_OURS, "torch_seam", "symbols.py"),
    __file__,
)
"""What stands between code that uses a symbolic number and what it is."""
_FRAME = re.compile(r'File "(.+)", line (\d+), in ')


def is_user_file(filename: str) -> bool:
    """Whether code in `filename` belongs to the user: neither torch's, nor ours, nor generated."""
    if filename.startswith((_TORCH, "<")):
        return False
    if filename.startswith(_EXAMPLES):
        return not filename.startswith(_COMMANDS)
    return not filename.startswith(_OURS)


class Origins:
    """Answers "which line of the user's program is running?" in about a microsecond a frame."""

    def __init__(self) -> None:
        self._user_file: dict[str, bool] = {}
        self._lines: dict[tuple[str, int], str] = {}

    def current(self) -> str:
        """The innermost line of the user's on the stack, as `file:line   code`, or an empty string.

        Where a graph runs that was made of the user's program, the line that it was made of.
        """
        if line := current_line():
            return line
        frame: FrameType | None = inspect.currentframe()
        while frame is not None:
            filename = frame.f_code.co_filename
            known = self._user_file.get(filename)
            if known is None:
                known = self._user_file[filename] = is_user_file(filename)
            if known:
                return self._line(filename, frame.f_lineno)
            frame = frame.f_back
        return ""

    def _line(self, filename: str, number: int) -> str:
        line = self._lines.get((filename, number))
        if line is None:
            line = self._lines[filename, number] = describe_line(filename, number)
        return line


def describe_line(filename: str, number: int) -> str:
    """`file:line   code`."""
    return f"{filename}:{number}   {linecache.getline(filename, number).strip()}"


def raised_at(traceback: TracebackType | None) -> str | None:
    """The innermost line of the user's that an exception passed through.

    Where there is none, the line that a graph was made of; if a module of PyTorch's own was compiled, the
    innermost line of `torch.nn`.
    """
    users, modules = None, None
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if is_user_file(filename):
            users = describe_line(filename, traceback.tb_lineno)
        elif filename.startswith(_TORCH_MODULES):
            modules = describe_line(filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return users or current_line() or modules


def is_asked_by_a_library(frame: FrameType | None) -> bool:
    """Whether a frame is called by a module of a library, rather than by the user's code itself."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
            return True
        if is_user_file(frame.f_code.co_filename):
            return False
        frame = frame.f_back
    return False


def is_asked_by_the_user() -> bool:
    """Whether the user's own code asks what a symbolic number is: the line that uses it is theirs."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_SYMBOLS):
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


def is_called_by_the_user() -> bool:
    """Whether a method of a symbolic number, which asks, is called by the user's own code."""
    return (code := code_behind(2)) is not None and is_user_file(code.co_filename)


def code_behind(depth: int) -> CodeType | None:
    """The code `depth` frames behind the function that asks."""
    frame = inspect.currentframe()
    for _ in range(depth + 1):
        frame = None if frame is None else frame.f_back
    return None if frame is None else frame.f_code


def line_of_stack(stack: str) -> str:
    """The innermost line of the user's in a stack that was written down, or an empty string.

    Where there is none, the innermost line of `torch.nn`.
    """
    frames = [(filename, int(number)) for filename, number in _FRAME.findall(stack)]
    users = [frame for frame in frames if is_user_file(frame[0])]
    lines = users or [frame for frame in frames if frame[0].startswith(_TORCH_MODULES)]
    return describe_line(*lines[-1]) if lines else ""
