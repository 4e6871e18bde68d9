"""Finds traced tensors in what a program returns and assigns: in pytrees, or hidden in other objects.

Tensors in a pytree become outputs, and every call makes the tree again. In any other object, the tensor of
the trace would remain.
"""

from __future__ import annotations

import functools
import types
from collections import defaultdict, deque
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from aotdist.capture.constants import is_constant, is_unreadable
from aotdist.errors import UnsupportedProgram
from aotdist.origins import raised_at
from aotdist.subclasses.protocol import is_real
from aotdist.torch_seam.functional import is_fake
from aotdist.torch_seam.symbols import SYMBOLIC, depends_on_data
from aotdist.torch_seam.trees import pytree

_NOT_ENTERED = (type, types.ModuleType)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)


_NO_VALUES = "without values while the program is captured"


def text_of(tensor: torch.Tensor) -> str:
    """The text for a traced tensor, which `is_text_of_traced` recognises in other texts."""
    return f"<tensor of size {list(tensor.size())} and {tensor.dtype}, {_NO_VALUES}>"


def is_text_of_traced(value: Any) -> bool:
    """Whether a value is a text that contains the text of a traced tensor."""
    return isinstance(value, str) and _NO_VALUES in value


def is_traced(value: Any) -> bool:
    """Whether `value` is a tensor of the trace."""
    return isinstance(value, torch.Tensor) and not is_real(value) and not is_fake(value)


def shows_traced(value: Any) -> bool:
    """Whether a leaf of `value`, as a pytree, is a tensor of the trace."""
    return any(map(is_traced, pytree.tree_leaves(value)))


@contextmanager
def no_results_kept(caches: Iterable[Any]) -> Generator[None]:
    """Empty caches (`functools.lru_cache`) that got results in this context: these may be traced tensors."""
    before = [(cache, cache.cache_info().misses) for cache in caches]
    try:
        yield
    finally:
        for cache, misses in before:
            if cache.cache_info().misses > misses:
                cache.cache_clear()


def hides_traced(value: Any, existing: Collection[int]) -> bool:
    """Whether an object that is no tensor holds traced tensors, or numbers that are read off such.

    Args:
        value: the object.
        existing: identities of objects from before the call. Modules among them do not count: stand-ins are
            in them only during the trace.
    """
    if isinstance(value, (torch.Tensor, *SYMBOLIC)):
        return False
    return _leads_to_traced(value, {}, existing)


def refuse_carried(error: BaseException, existing: Collection[int]) -> None:
    """Refuse an exception of the program that holds tensors of the trace: they have no data."""
    if hides_traced(error, existing) or hides_traced([error.args], existing):
        raise UnsupportedProgram(
            f"the program raises a {type(error).__name__} that carries a tensor which it computes",
            where=raised_at(error.__traceback__),
            stage="capture",
            fix="raise it without the tensor, or outside of the compiled function",
        ) from None


def _leads_to_traced(value: Any, seen: dict[int, Any], existing: Collection[int]) -> bool:
    if is_unreadable(value):
        return False
    if isinstance(value, torch.Tensor):
        return is_traced(value)
    if isinstance(value, SYMBOLIC):
        return depends_on_data(value)
    if is_constant(value) or isinstance(value, _NOT_ENTERED) or id(value) in seen:
        return False
    if isinstance(value, nn.Module) and id(value) in existing:
        return False
    seen[id(value)] = value  # keeps the object alive: no other may get its identity
    return any(_leads_to_traced(part, seen, existing) for part in _parts(value))


def _parts(value: Any) -> Iterator[Any]:
    """The objects in an object: attributes, items of a container, what a function closes over."""
    yield from (part for _, part in attributes_of(value))
    yield from _held_by_code(value)
    if isinstance(value, _CONTAINERS):  # to pytrees, keys are constants, and sets and subclasses leaves
        yield from value
        yield from value.values() if isinstance(value, dict) else ()
    yield from pytree.tree_leaves(value, is_leaf=lambda part: part is not value)


def _held_by_code(value: Any) -> Iterator[Any]:
    match value:
        case types.FunctionType():
            yield from (part for cell in value.__closure__ or () for part in contents(cell))
            yield from value.__defaults__ or ()
            yield from (value.__kwdefaults__ or {}).values()
        case types.MethodType():
            yield value.__self__
        case functools.partial():
            yield from (value.func, *value.args, *value.keywords.values())
        case _:
            pass


def contents(cell: types.CellType) -> tuple[Any, ...]:
    """The value of a closure variable; empty if it has not been assigned yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """An object's own attributes by name: those in its `__dict__`, and those in the slots of its classes."""
    yield from getattr(value, "__dict__", {}).items()
    if isinstance(value, defaultdict):
        yield "default_factory", value.default_factory
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def refusal(what: str, way_out: str) -> UnsupportedProgram:
    """The error for an object that hides tensors of the program.

    Args:
        what: where it is, and which tensors it hides.
        way_out: how to avoid it, other than by registering its class as a pytree.
    """
    return UnsupportedProgram(
        what,
        stage="capture",
        fix=f"{way_out}, or register the class with `torch.utils._pytree.register_pytree_node`",
    )
