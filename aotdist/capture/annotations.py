"""What is known, while a program runs under the recorder, about the operations it is about to do.

Context variables rather than arguments, because those who know (module hooks, an autograd function's
backward) are called by PyTorch, not by us.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from types import MappingProxyType

_MODULE: ContextVar[str] = ContextVar("aotdist_module", default="")
_LINE: ContextVar[str] = ContextVar("aotdist_line", default="")
_NO_TAGS: Mapping[str, str] = MappingProxyType({})
_TAGS: ContextVar[Mapping[str, str]] = ContextVar("aotdist_tags", default=_NO_TAGS)


def current_module() -> str:
    """Qualified name of the module whose forward is running, or an empty string."""
    return _MODULE.get()


def current_tags() -> Mapping[str, str]:
    """`unit` and `policy` of the operations that run now, if any."""
    return _TAGS.get()


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
