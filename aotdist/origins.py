"""Which line of the user's program an operation, or an error, comes from, and tracebacks for the user.

Between the user's call and the line of theirs that fails, PyTorch and aotdist put some forty frames while a
program is captured; a traceback leaves them out, but for those of `torch.nn`, and one of ours. With
`AOTDIST_TRACEBACK=full` all of them are shown.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import os
import re
import sysconfig
from collections.abc import Callable, Generator, Mapping
from contextvars import ContextVar
from types import CodeType, FrameType, MappingProxyType, TracebackType
from typing import ParamSpec, TypeVar

import torch

from aotdist import program
from aotdist.errors import AotdistError, InternalError
from aotdist.settings import shows_all_frames

_MODULE: ContextVar[str] = ContextVar("aotdist_module", default="")
_PATHS: ContextVar[Mapping[torch.nn.Module, str]] = ContextVar("aotdist_paths")
_LINE: ContextVar[str] = ContextVar("aotdist_line", default="")
_NO_TAGS: Mapping[str, str] = MappingProxyType({})
_TAGS: ContextVar[Mapping[str, str]] = ContextVar("aotdist_tags", default=_NO_TAGS)


def current_module() -> str:
    """Qualified name of the module whose forward is running, or an empty string."""
    return _MODULE.get()


def current_tags() -> Mapping[str, str]:
    """`unit` and `policy` of the operations that run now, if any."""
    return _TAGS.get()


def path_of(module: torch.nn.Module) -> str | None:
    """Qualified name of a module of the program that is captured; None for any other."""
    return _PATHS.get({}).get(module)


@contextlib.contextmanager
def with_paths(paths: Mapping[torch.nn.Module, str]) -> Generator[None]:
    """Say which modules the program that is captured inside has, and what they are called."""
    token = _PATHS.set(paths)
    try:
        yield
    finally:
        _PATHS.reset(token)


def set_current_module(path: str) -> None:
    """Say whose forward runs from now on."""
    _MODULE.set(path)


@contextlib.contextmanager
def inside_module(path: str) -> Generator[None]:
    """Say that the forward of the module at `path` runs inside."""
    token = _MODULE.set(path)
    try:
        yield
    finally:
        _MODULE.reset(token)


def current_line() -> str:
    """The user's line that a graph was made of which runs in its place, if one does."""
    return _LINE.get()


def set_current_line(line: str) -> None:
    """Say which of the user's lines runs from now on, where the stack does not tell."""
    _LINE.set(line)


@contextlib.contextmanager
def annotate(unit: str, policy: str | None = None) -> Generator[None]:
    """Set `unit`, and `policy` if given, on every node that is recorded inside."""
    token = _TAGS.set({**_TAGS.get(), "unit": unit} | ({"policy": policy} if policy else {}))
    try:
        yield
    finally:
        _TAGS.reset(token)


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
