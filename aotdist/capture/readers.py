"""What a program reads through objects that are no containers.

Functions have cells and defaults. Context variables, weak references and arrays keep their identity while
their content changes, so an artifact is specialised on the content. So it is on the level of a logger, from
which all loggers of the process could be reached.
"""

from __future__ import annotations

import array
import contextvars
import functools
import logging
import os
import types
import weakref
from collections.abc import Callable, Container, Iterator, MutableMapping
from typing import Any

import numpy as np
from torch import nn

from aotdist.capture.leaked_tensors import contents
from aotdist.capture.source import Source

_LARGEST_ARRAY = 1 << 20
"""Bytes: a larger array is data rather than a setting, and too much to compare at every call."""
_SHARE_MEMORY = ("from_numpy", "as_tensor", "asarray")


def reader_of(value: Any, names: Container[str]) -> Callable[[Any], Any] | None:
    """The function that returns the content of `value`, if an artifact is specialised on that; else None.

    Args:
        value: any object.
        names: attributes that the program reads. If it may make tensors that share the memory of arrays,
            there is none for arrays: the tensors are inputs.
    """
    if isinstance(value, contextvars.ContextVar):
        return value_of_variable
    if isinstance(value, weakref.ref):
        return referent
    if value is os.environ:
        return environment
    if isinstance(value, logging.Logger):
        return effective_level
    if isinstance(value, (bytearray, array.array)):
        return items if len(memoryview(value).cast("B")) <= _LARGEST_ARRAY else None
    if not isinstance(value, (np.ndarray, np.generic)):
        return None
    shares = is_array(value) and any(name in names for name in _SHARE_MEMORY)
    is_data = not value.dtype.hasobject and value.nbytes <= _LARGEST_ARRAY
    return numbers if is_data and not shares else None


def is_array(value: Any) -> bool:
    """Whether `value` is a numpy array."""
    return isinstance(value, np.ndarray)


def effective_level(logger: logging.Logger) -> str:
    """The name of the lowest level that a logger reports: numbers may become symbols."""
    return logging.getLevelName(logger.getEffectiveLevel())


def value_of_variable(variable: contextvars.ContextVar[Any]) -> Any:
    """The value of a context variable in this context; None if it has none."""
    try:
        return variable.get()
    except LookupError:
        return None


def referent(reference: weakref.ref[Any]) -> Any:
    """The object that a weak reference refers to; None if it is gone."""
    return reference()


def environment(variables: MutableMapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables of the environment."""
    return tuple(variables.items())


def items(values: bytearray | array.array[Any]) -> tuple[Any, ...]:
    """The items of a mutable array of Python's standard library."""
    return tuple(values)


def numbers(values: Any) -> tuple[str, tuple[int, ...], bytes]:
    """The dtype, shape and bytes of a numpy array or scalar."""
    return values.dtype.str, values.shape, values.tobytes()


def cells_of(fn: types.FunctionType) -> Iterator[tuple[Source, Any]]:
    """The closure variables of a function, with their values."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        for value in contents(cell):
            yield Source(name, cell).attribute("cell_contents", name), value


def empty_cells_of(fn: types.FunctionType) -> list[Source]:
    """Closure variables that have not been assigned yet."""
    pairs = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    return [Source(name, cell).attribute("cell_contents", name) for name, cell in pairs if not contents(cell)]


def wrapped_by(fn: types.FunctionType) -> Iterator[tuple[Source, Any]]:
    """The functions in the closure of an installed decorator (`torch.no_grad()`)."""
    callables = (types.FunctionType, types.MethodType, functools.partial, nn.Module)
    yield from ((place, value) for place, value in cells_of(fn) if isinstance(value, callables))


def defaults_of(fn: types.FunctionType) -> Iterator[tuple[Source, Any]]:
    """The defaults of a function's arguments."""
    defaults = fn.__defaults__ or ()
    first = fn.__code__.co_argcount - len(defaults)
    for index, value in enumerate(defaults):
        path = f"{fn.__name__}({fn.__code__.co_varnames[first + index]})"
        yield Source(fn.__name__, fn).attribute("__defaults__").item(index, path), value
    for name, value in (fn.__kwdefaults__ or {}).items():
        yield Source(fn.__name__, fn).attribute("__kwdefaults__").item(name, f"{fn.__name__}({name})"), value
