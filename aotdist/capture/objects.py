"""Objects that no pytree takes apart, in what a program returns: a key-value cache beside the logits.

Eager makes such an object anew at every call. One that holds tensors of the program is therefore taken apart
by its attributes, which become results, and put together again at every call: an object of the same class,
whose `__init__` does not run. A module that the program makes is one. What holds none of them stays the
object that the capture made.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Collection, Iterator, MappingView
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.capture.constants import is_constant, is_leaf
from aotdist.capture.hidden import attributes_of, hides_traced, refusal
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam import pytree

_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
_CALLED = (types.FunctionType, types.MethodType, functools.partial)
_WHOLE = (torch.Tensor, type, *_CODE)
"""What has attributes, and is no object to be taken apart."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """An object's class and attributes, in its place in a pytree."""

    cls: type
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Members:
    """A set of an object that is taken apart, in its place in a pytree: pytrees take sets for leaves."""

    values: list[Any]


def _flatten(parts: _Parts) -> tuple[list[Any], tuple[type, tuple[str, ...]]]:
    return list(parts.attributes.values()), (parts.cls, tuple(parts.attributes))


def _put_together(values: Any, context: tuple[type, tuple[str, ...]]) -> Any:
    cls, names = context
    made = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(_Parts, _flatten, _put_together)
pytree.register_pytree_node(_Members, lambda members: (members.values, None), lambda values, _: set(values))


def taken_apart(result: Any, existing: Collection[int]) -> Any:
    """`result` as a pytree whose leaves are all the tensors of the program in it.

    Args:
        result: what a program returned, or a part of that.
        existing: identities of objects that were there before the call; they stay themselves.

    Raises:
        UnsupportedProgram: tensors are held in a way that cannot be repeated.
    """
    leaves, spec = pytree.tree_flatten(result, is_leaf=is_leaf)
    if all(is_constant(leaf) or isinstance(leaf, torch.Tensor) for leaf in leaves):
        return result
    apart = _Apart(existing)
    return pytree.tree_unflatten([apart.leaf(leaf) for leaf in leaves], spec)


class _Apart:
    """Takes apart the objects of one result, each of which may be in it once."""

    def __init__(self, existing: Collection[int]) -> None:
        self._existing = existing
        self._met: set[int] = set()

    def leaf(self, value: Any) -> Any:
        if id(value) not in self._existing:
            _refuse_deferred(value, self._existing)
        if not _may_be_taken_apart(value) or id(value) in self._existing:
            return value
        if not hides_traced(value, self._existing):
            return value
        cls = type(value)
        if id(value) in self._met:
            raise _refused(cls, "in two places", "return it once")
        self._met.add(id(value))
        try:
            object.__new__(cls)
        except TypeError as error:
            raise _refused(cls, "which cannot be made anew", "return the tensors themselves") from error
        return _Parts(cls, {name: self._part(part) for name, part in attributes_of(value)})

    def _part(self, value: Any) -> Any:
        if type(value) is set and id(value) not in self._existing:
            return _Members([self._part(item) for item in value])
        return pytree.tree_map(self.leaf, value, is_leaf=is_leaf)


def _refuse_deferred(value: Any, existing: Collection[int]) -> None:
    """Refuse what computes, or shows, tensors of the program when the call is over."""
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
    return refusal(
        f"the program returns a {cls.__name__} that holds tensors which it computes, {how}", way_out
    )


def _may_be_taken_apart(value: Any) -> bool:
    return not (is_constant(value) or isinstance(value, _WHOLE))
