"""Where a function holds what it can read besides its arguments: its cells and defaults."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from aotdist.capture.hidden import contents
from aotdist.capture.source import Source


def cells_of(fn: types.FunctionType) -> Iterator[tuple[Source, Any]]:
    """The variables that it is closed over, with what they hold."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        for value in contents(cell):
            yield Source(name, cell).attribute("cell_contents", name), value


def empty_cells_of(fn: types.FunctionType) -> list[Source]:
    """Those that hold nothing yet."""
    pairs = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    return [Source(name, cell).attribute("cell_contents", name) for name, cell in pairs if not contents(cell)]


def wrapped_by(fn: types.FunctionType) -> Iterator[tuple[Source, Any]]:
    """The functions that an installed decorator (`torch.no_grad()`) is closed over."""
    callables = (types.FunctionType, types.MethodType, functools.partial, nn.Module)
    yield from ((place, value) for place, value in cells_of(fn) if isinstance(value, callables))


def defaults_of(fn: types.FunctionType) -> Iterator[tuple[Source, Any]]:
    """The defaults of its arguments."""
    defaults = fn.__defaults__ or ()
    first = fn.__code__.co_argcount - len(defaults)
    for index, value in enumerate(defaults):
        path = f"{fn.__name__}({fn.__code__.co_varnames[first + index]})"
        yield Source(fn.__name__, fn).attribute("__defaults__").item(index, path), value
    for name, value in (fn.__kwdefaults__ or {}).items():
        yield Source(fn.__name__, fn).attribute("__kwdefaults__").item(name, f"{fn.__name__}({name})"), value
