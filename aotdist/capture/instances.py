"""Objects that are no pytrees: a key-value cache, a batch that is a dataclass.

Among the arguments, the content of an object (attributes, slots, the items of a subclass of `list` or `dict`)
is treated like the items of a dictionary: tensors are inputs, constants belong to the signature. The trace
gets another object of the same class, whose `__init__` does not run, with stand-ins in it; every call repeats
on the caller's object what the program changes in it (`aotdist.capture.argument_mutation`).

If the program returns such an object, eager makes a new one at every call. So an object that holds tensors of
the program (a module that it makes, for example) is taken apart: its attributes become results, from which
every call makes an object of the same class. One without such tensors stays that of the capture.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Collection, Iterator, Mapping, MappingView
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from aotdist.capture.code import is_users_class
from aotdist.capture.constants import is_constant, is_leaf, is_unreadable
from aotdist.capture.leaked_tensors import attributes_of, hides_traced, refusal
from aotdist.capture.source import built_in_class_of, kept_by
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.symbols import SYMBOLIC
from aotdist.torch_seam.trees import pytree, tree_children

STEPPERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""Classes of objects with a `step` of their own: a call is specialised on which one it is given."""
_CODE = (
    nn.Module,
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    functools.partial,
    *STEPPERS,
    torch.Generator,
    DeviceMesh,
    ProcessGroup,
)
_NO_DATA = (torch.Tensor, Iterator, BaseException, DataLoader, Dataset)
_MADE_BY = (object, dict, list, types.SimpleNamespace)


@dataclass(frozen=True, slots=True)
class ArgumentObject:
    """Stands in a result for an object among the arguments, by position among these."""

    position: int


def is_code(value: Any) -> bool:
    """Whether calls are specialised on the identity of a value: modules, functions, generators, meshes."""
    return isinstance(value, _CODE)


def is_same_code(a: Any, b: Any) -> bool:
    """Whether two of these are the same; each read of a method makes a new method object."""
    if isinstance(a, types.MethodType) and isinstance(b, types.MethodType):
        return a.__self__ is b.__self__ and a.__func__ is b.__func__
    return a is b


def is_instance(value: Any) -> bool:
    """Whether `value` is an object that can be taken apart and made again."""
    if is_unreadable(value) or isinstance(value, _NO_DATA) or is_constant(value) or is_code(value):
        return False
    return type(value) not in pytree.SUPPORTED_NODES and _can_be_made(type(value))


@functools.cache
def _can_be_made(cls: type) -> bool:
    if cls in (object, dict, list) or _maker(cls) not in _MADE_BY:
        return False
    try:
        make_instance(cls)
    except TypeError:  # it has abstract methods, or a memory layout of its own
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
    """The values in the slots of an object, by name."""
    own = getattr(value, "__dict__", {})
    return {name: held for name, held in attributes_of(value) if name not in own}


def items_of(value: Any) -> Any:
    """The items of an object of a subclass of `list` or `dict`, as a `list` or `dict`; None of any other."""
    return kept_by(value) if isinstance(value, (list, dict)) else None


def make_instance(cls: type) -> Any:
    """An object of a class without attributes or items: its `__init__` does not run."""
    maker: Any = _maker(cls)
    return maker.__new__(cls)


def fill_instance(made: Any, attributes: dict[str, Any], items: list[Any] | dict[Any, Any] | None) -> None:
    """Set the attributes and items of a new object, past its own `__setattr__` (of a frozen dataclass)."""
    own = getattr(made, "__dict__", {})
    for name, value in attributes.items():
        if _is_slot(type(made), name):
            object.__setattr__(made, name, value)
        else:
            own[name] = value
    if isinstance(items, dict):
        for key, item in items.items():
            built_in_class_of(made).__setitem__(made, key, item)
    elif items is not None:
        list.extend(made, items)


def _is_slot(cls: type, name: str) -> bool:
    return any(isinstance(vars(base).get(name), types.MemberDescriptorType) for base in cls.__mro__)


# What a program returns.

_CALLED = (types.FunctionType, types.MethodType, functools.partial)
_WHOLE = (
    torch.Tensor,
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
)
"""Kinds of objects that are never taken apart although they have attributes."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """An object that was taken apart, at the first of its places."""

    cls: type
    attributes: dict[str, Any]
    items: Any
    number: int


@dataclass(frozen=True, slots=True)
class MadeObject:
    """Stands for an object at a further place; it is made at its first place."""

    number: int


@dataclass(frozen=True, slots=True)
class _Members:
    """A set in an object that was taken apart; sets themselves are leaves of pytrees."""

    values: list[Any]


def _flatten(parts: _Parts) -> tuple[list[Any], tuple[type, tuple[str, ...], int]]:
    return [parts.items, *parts.attributes.values()], (parts.cls, tuple(parts.attributes), parts.number)


def _put_together(values: Any, context: tuple[type, tuple[str, ...], int]) -> Any:
    cls, names, _ = context
    made = make_instance(cls)
    items, *attributes = values
    fill_instance(made, dict(zip(names, attributes, strict=True)), items)
    return made


pytree.register_pytree_node(_Parts, _flatten, _put_together)
pytree.register_pytree_node(_Members, lambda members: (members.values, None), lambda values, _: set(values))


def number_of(spec: pytree.TreeSpec) -> int | None:
    """The number of the object that `spec` makes; None if it makes none."""
    return spec.context[-1] if spec.type is _Parts else None


def holds_objects(spec: pytree.TreeSpec) -> bool:
    """Whether objects are made in `spec`."""
    return number_of(spec) is not None or any(map(holds_objects, tree_children(spec)))


def taken_apart(
    result: Any,
    existing: Collection[int],
    made: dict[int, int],
    positions: Mapping[int, int],
    *,
    anew: bool = False,
) -> Any:
    """`result` with objects taken apart that hold tensors of the program, or that it made of users' classes.

    What it made is in the collector's youngest generation, unlike what a `functools.cache` had before.

    Args:
        result: what a program returned, or a part of that.
        existing: identities of objects from before the call, which are not taken apart.
        made: numbers of the objects that were taken apart so far, by identity; more are added.
        positions: of the objects among the arguments, by identity; references to these are returned.
        anew: whether other objects are taken apart, too; a library may have made them before.

    Raises:
        UnsupportedProgram: an object that holds tensors cannot be made again.
    """
    leaves, spec = pytree.tree_flatten(result, is_leaf=is_leaf)
    if all(is_constant(leaf) or isinstance(leaf, torch.Tensor) for leaf in leaves):
        return result
    entered = set[int]()
    young = functools.cache(lambda: frozenset(map(id, gc.get_objects(generation=0))))

    def part(value: Any) -> Any:
        if type(value) is set and id(value) not in existing:
            return _Members([part(item) for item in value])
        return pytree.tree_map(leaf_or_parts, value, is_leaf=is_leaf)

    def leaf_or_parts(value: Any) -> Any:
        """A leaf of the result: a reference to an object, an object's parts, or the leaf itself."""
        if (position := positions.get(id(value))) is not None:
            return ArgumentObject(position)
        if (number := made.get(id(value))) is not None:
            if id(value) in entered:
                raise _refused(type(value), "itself among them", "return the tensors themselves")
            return MadeObject(number)
        is_made = anew or (is_users_class(type(value)) and id(value) in young())
        if id(value) in existing or _stays(value, existing, is_made=is_made and is_instance(value)):
            return value
        cls = type(value)
        if not is_instance(value) and not isinstance(value, nn.Module):
            raise _refused(cls, "which cannot be made anew", "return the tensors themselves")
        number = made[id(value)] = len(made)
        entered.add(id(value))
        attributes, items = state_of(value)
        parts = _Parts(cls, {name: part(held) for name, held in attributes.items()}, part(items), number)
        entered.remove(id(value))
        return parts

    return pytree.tree_unflatten(map(leaf_or_parts, leaves), spec)


def _stays(value: Any, existing: Collection[int], *, is_made: bool) -> bool:
    """Whether a leaf that the program made is returned as it is; see `taken_apart`."""
    if is_constant(value) or isinstance(value, SYMBOLIC):
        return True
    _refuse_deferred(value, existing)
    return isinstance(value, _WHOLE) or not (is_made or hides_traced(value, existing))


def _refuse_deferred(value: Any, existing: Collection[int]) -> None:
    """Refuse results that would yield tensors of the trace after the call (iterators, functions)."""
    kind = type(value).__name__
    if isinstance(value, (Iterator, MappingView)) and type(value).__module__ in ("builtins", "itertools"):
        raise UnsupportedProgram(
            f"the program returns a {kind}, which is no value that can be returned again at each call",
            stage="capture",
            fix="return a list, a tuple or a dictionary",
        )
    if isinstance(value, _CALLED) and hides_traced(value, existing):
        raise UnsupportedProgram(
            f"the program returns a {kind} that holds tensors which it computes",
            stage="capture",
            fix="return the tensors themselves, and make the function outside",
        )


def _refused(cls: type, how: str, way_out: str) -> UnsupportedProgram:
    return refusal(f"the program makes a {cls.__name__} that holds tensors which it computes, {how}", way_out)
