"""The user's line that an operation or an error comes from, and shorter tracebacks.

While a program is captured, there are some forty frames of PyTorch and aotdist between the user's call and
the line that fails. Tracebacks leave them out, except those of `torch.nn` and one of ours, unless
`AOTDIST_TRACEBACK=full`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager
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
V = TypeVar("V")
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
def holding(variable: ContextVar[V], value: V) -> Generator[None]:
    """A block in which a context variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def with_paths(paths: Mapping[torch.nn.Module, str]) -> AbstractContextManager[None]:
    """A block that captures a program with these modules, of these qualified names."""
    return holding(_PATHS, paths)


def set_current_module(path: str) -> None:
    """Set what `current_module` returns from now on."""
    _MODULE.set(path)


def inside_module(path: str) -> AbstractContextManager[None]:
    """A block in which the forward of the module at `path` runs."""
    return holding(_MODULE, path)


def current_line() -> str:
    """The user's line that the running graph was made of; empty if no graph of a user's program runs."""
    return _LINE.get()


def set_current_line(line: str) -> None:
    """Set what `current_line` returns from now on."""
    _LINE.set(line)


def annotate(unit: str, policy: str | None = None) -> AbstractContextManager[None]:
    """A block in which every recorded node gets this `unit`, and `policy` if given."""
    return holding(_TAGS, {**_TAGS.get(), "unit": unit} | ({"policy": policy} if policy else {}))


_TORCH = os.path.dirname(torch.__file__) + os.sep
_TORCH_MODULES = os.path.join(_TORCH, "nn") + os.sep
_OURS = os.path.dirname(program.__file__) + os.sep
# The trainer that ships with aotdist counts as the user's code; the other commands do not.
_EXAMPLES = os.path.join(_OURS, "launch") + os.sep
_COMMANDS = os.path.join(_EXAMPLES, "commands") + os.sep
_PYTHONS = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
"""Folders of packages: an environment may show those of the system, and of the user, beside its own."""
_LIBRARIES = ("torch.nn.", "torch.optim.swa_utils", "transformers.")
"""Modules that may branch on data wherever they are, as packages may: the user cannot change them."""
_SYMBOLS = (
    os.path.join(_TORCH, "__init__.py"),
    os.path.join(_TORCH, "fx", "experimental") + os.sep,
    os.path.join(_OURS, "torch_seam", "symbols.py"),
)
"""Files whose frames lie between code that uses a symbolic number and the number itself."""
_FRAME = re.compile(r'File "(.+)", line (\d+), in ')


def is_user_file(filename: str) -> bool:
    """Whether code in `filename` belongs to the user: neither torch's, nor ours, nor generated."""
    if filename.startswith((_TORCH, "<")):
        return False
    if filename.startswith(_EXAMPLES):
        return not filename.startswith(_COMMANDS)
    return not filename.startswith(_OURS)


def is_of_a_package(filename: str) -> bool:
    """Whether `filename` was installed, by pip or by the system, in whichever environment."""
    return any(folder in filename for folder in _PACKAGES)


def is_of_python(filename: str) -> bool:
    """Whether `filename` is of Python's own library."""
    return filename.startswith(_PYTHONS) and not is_of_a_package(filename)


@functools.cache
def _says_where(filename: str) -> bool:
    """Whether a line of `filename` tells the user where something happens: Python's own library's do not."""
    return is_user_file(filename) and not is_of_python(filename)


def current_source_line() -> str:
    """The user's innermost line on the stack, as `file:line   code`, or an empty string.

    While a graph runs that was made of the user's program, it is the line that the graph was made of.
    """
    if line := current_line():
        return line
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if _says_where(filename := frame.f_code.co_filename):
            return sys.intern(describe_line(filename, frame.f_lineno))  # one text for all nodes of a line
        frame = frame.f_back
    return ""


def describe_line(filename: str, number: int) -> str:
    """`file:line   code`."""
    return f"{filename}:{number}   {linecache.getline(filename, number).strip()}"


def raised_at(traceback: TracebackType | None) -> str | None:
    """The user's innermost line that an exception passed through.

    If there is none, it is the line that the running graph was made of, or else the innermost line of
    `torch.nn`.
    """
    users, modules = None, None
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if _says_where(filename):
            users = describe_line(filename, traceback.tb_lineno)
        elif filename.startswith(_TORCH_MODULES):
            modules = describe_line(filename, traceback.tb_lineno)
        traceback = traceback.tb_next
    return users or current_line() or modules


def is_asked_by_a_library(frame: FrameType | None, *, of_pytorch: bool = True) -> bool:
    """Whether a frame is called by a module of a library, maybe PyTorch's, rather than by the user's code."""
    names = _LIBRARIES if of_pytorch else _LIBRARIES[-1:]
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(names):
            return True
        if is_user_file(filename := frame.f_code.co_filename):
            return is_of_a_package(filename)
        frame = frame.f_back
    return False


def is_asked_by_the_user(frame: FrameType | None) -> bool:
    """Whether the line that uses a symbolic number as a number, above `frame`, is in the user's own code."""
    frame = None if frame is None else frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_SYMBOLS):
        frame = frame.f_back
    return frame is not None and is_user_file(frame.f_code.co_filename)


def is_called_by_the_user() -> bool:
    """Whether the caller, a method of a symbolic number, was called by the user's own code."""
    return (code := code_behind(2)) is not None and is_user_file(code.co_filename)


def code_behind(depth: int) -> CodeType | None:
    """The code that is `depth` frames above the caller."""
    frame = inspect.currentframe()
    for _ in range(depth + 1):
        frame = None if frame is None else frame.f_back
    return None if frame is None else frame.f_code


def line_of_stack(stack: str) -> str:
    """The innermost line of the user's in a stack trace, or else of `torch.nn`; empty if there is neither."""
    frames = [(filename, int(number)) for filename, number in _FRAME.findall(stack)]
    users = [frame for frame in frames if _says_where(frame[0])]
    lines = users or [frame for frame in frames if frame[0].startswith(_TORCH_MODULES)]
    return describe_line(*lines[-1]) if lines else ""


E = TypeVar("E", bound=BaseException)
P = ParamSpec("P")
R = TypeVar("R")

_NOTE = "(frames of PyTorch and aotdist are left out; AOTDIST_TRACEBACK=full shows them)"
_KERNELS = "_aotdist_is_of_a_kernel"
_CALLING = (
    os.path.join(_TORCH_MODULES, "modules", "module.py"),
    os.path.join(_TORCH_MODULES, "parallel") + os.sep,
)
"""Files of `torch.nn` that only call modules."""


def note_kernels(error: BaseException) -> None:
    """Note that a kernel raises `error`, as in eager: its frames tell the user nothing."""
    setattr(error, _KERNELS, True)


def shortened(error: E) -> E:
    """`error` with a traceback of the user's frames only.

    The causes of our own errors are dropped. Internal errors, and errors whose traceback has no line of the
    user's, of `torch.nn` or of a printed graph, keep all frames.
    """
    if shows_all_frames() or isinstance(error, InternalError):
        return error
    found = _only(error.__traceback__, _is_shown) or _only(error.__traceback__, _is_printed)
    if found is None and isinstance(error, AotdistError) and error.__cause__ is not None:
        found = _only(error.__cause__.__traceback__, _is_shown)  # the lines that led to the refusal
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
    """Shorten the causes of an exception of the user's, and drop those that only our code handled."""
    seen = {id(error)}
    while (before := error.__cause__ or error.__context__) is not None and id(before) not in seen:
        found = _only(before.__traceback__, _is_shown)
        if isinstance(before, AotdistError) or found is None:
            error.__cause__ = error.__context__ = None
            return
        seen.add(id(before))
        before.__traceback__ = found
        error = before


def _only(traceback: TracebackType | None, is_shown: Callable[[str], bool]) -> TracebackType | None:
    """The part of a traceback that is in some files; None if it is empty."""
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
    if filename.startswith(_TORCH_MODULES):
        return not filename.startswith(_CALLING)
    return _says_where(filename)


def _is_printed(filename: str) -> bool:
    return filename.startswith("<aotdist ")


def short_tracebacks(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, with the errors that it raises `shortened`."""

    @functools.wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise shortened(error)  # noqa: B904  # the same one

    return entered
