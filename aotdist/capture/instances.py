"""Objects that no pytree takes apart, among the arguments: a key-value cache, a batch that is a dataclass.

What an object holds (attributes, slots, the items of a subclass of `list` or `dict`) is part of a call as the
items of a dictionary are: tensors are inputs, constants belong to the signature. The trace is given another
object of the same class, whose `__init__` does not run, filled with stand-ins; what the program changes in it
is changed in the caller's object at every call (`aotdist.capture.argument_mutation`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from aotdist.capture.constants import is_constant, is_unreadable
from aotdist.capture.leaked_tensors import attributes_of
from aotdist.torch_seam.trees import pytree

HAVE_TURNS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""Objects on which a training step acts: that one, whatever another has in its attributes."""
_CODE = (
    nn.Module,
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    functools.partial,
    *HAVE_TURNS,
    torch.Generator,
    DeviceMesh,
    ProcessGroup,
)
_NO_DATA = (torch.Tensor, Iterator, BaseException, DataLoader, Dataset)
_MADE_BY = (object, dict, list, types.SimpleNamespace)


@dataclass(frozen=True, slots=True)
class ArgumentObject:
    """Stands, in what a program returns, for an object among its arguments, by position among those."""

    position: int


def is_code(value: Any) -> bool:
    """Whether a call is specialised on which object it is: modules, functions, generators, meshes."""
    return isinstance(value, _CODE)


def is_same_code(a: Any, b: Any) -> bool:
    """Whether two of these are the same; every access to a method makes another object."""
    if isinstance(a, types.MethodType) and isinstance(b, types.MethodType):
        return a.__self__ is b.__self__ and a.__func__ is b.__func__
    return a is b


def is_instance(value: Any) -> bool:
    """Whether `value` is an object that can be taken apart, and made anew."""
    if is_unreadable(value) or isinstance(value, _NO_DATA) or is_constant(value) or is_code(value):
        return False
    return type(value) not in pytree.SUPPORTED_NODES and _can_be_made(type(value))


@functools.cache
def _can_be_made(cls: type) -> bool:
    if cls in (object, dict, list) or _maker(cls) not in _MADE_BY:
        return False
    try:
        make_instance(cls)
    except TypeError:  # it has abstract methods, or a layout in memory that is its own
        return False
    return True


def _maker(cls: type) -> type:
    """The nearest base whose `__new__` is not written in Python."""
    return next(
        base
        for base in cls.__mro__
        if not isinstance(vars(base).get("__new__", _maker), (types.FunctionType, staticmethod))
    )


def state_of(value: Any) -> tuple[dict[str, Any], Any]:
    """Attributes of an object by name, and its items if its class is a subclass of `list` or `dict`."""
    return dict(attributes_of(value)), items_of(value)


def slots_of(value: Any) -> dict[str, Any]:
    """What is in the slots of an object, by name."""
    own = getattr(value, "__dict__", {})
    return {name: held for name, held in attributes_of(value) if name not in own}


def items_of(value: Any) -> Any:
    """The items of an object of a subclass of `list` or `dict`, as a `list` or `dict`; None of any other."""
    if isinstance(value, dict):
        return dict(dict.items(value))
    return list.copy(value) if isinstance(value, list) else None


def make_instance(cls: type) -> Any:
    """An object of a class, empty: its `__init__` does not run."""
    maker: Any = _maker(cls)
    return maker.__new__(cls)


def fill_instance(made: Any, attributes: dict[str, Any], items: list[Any] | dict[Any, Any] | None) -> None:
    """Let an empty object hold these; its own `__setattr__` (a frozen dataclass's) is not asked."""
    own = getattr(made, "__dict__", {})
    for name, value in attributes.items():
        if _is_slot(type(made), name):
            object.__setattr__(made, name, value)
        else:
            own[name] = value
    if isinstance(items, dict):
        dict.update(made, items)
    elif items is not None:
        list.extend(made, items)


def _is_slot(cls: type, name: str) -> bool:
    return any(isinstance(vars(base).get(name), types.MemberDescriptorType) for base in cls.__mro__)
