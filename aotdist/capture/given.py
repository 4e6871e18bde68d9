"""Lists, dictionaries and objects among the arguments: what a program changes in them changes at each call.

A trace is given others than the caller's, made of stand-ins; what became of these is repeated. The objects
are those that pytrees take apart: of registered classes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from aotdist.capture.constants import is_constant, is_leaf, is_same
from aotdist.capture.source import ABSENT, Attribute, Given, Source
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam import pytree

_ATTRIBUTES = Attribute("__dict__")


class GivenContainers:
    """The containers that a trace is given, and what was in them.

    Args:
        args: positional arguments of the trace.
        kwargs: the others, by name.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found = [each for position, value in enumerate(args) for each in _containers(_place(position), value)]
        found += [each for name, value in kwargs.items() for each in _containers(_place(name), value)]
        # What lies deeper first: it may have left what it lay in.
        found.sort(key=lambda pair: -len(pair[0].steps))
        self._watched = [(place, held, held.copy()) for place, held in found]

    def assigned(self) -> list[tuple[Source, Any]]:
        """Places that hold something else now, and what.

        Raises:
            UnsupportedProgram: a list is shorter, or holds what no call could be given.
        """
        found: list[tuple[Source, Any]] = []
        for place, held, before in self._watched:
            if isinstance(held, list) and len(held) > len(before) and all(map(operator.is_, before, held)):
                grown = place.items_from(len(before))
                found.append((grown, self._checked(grown, held[len(before) :])))
                continue
            if isinstance(held, list) and len(held) != len(before):
                raise UnsupportedProgram(
                    f"the list `{place.path}` loses items in the compiled function",
                    stage="capture",
                    fix="return what is left, or take the items out outside",
                )
            for key, value in list(held.items() if isinstance(held, dict) else enumerate(held)):
                then = before.get(key, ABSENT) if isinstance(before, dict) else before[key]
                if not is_same(value, then):
                    found.append((_entry(place, key), self._checked(_entry(place, key), value)))
        return found

    def deleted(self) -> list[Source]:
        """Places of dictionaries and objects that hold nothing any more."""
        return [
            _entry(place, key)
            for place, held, before in self._watched
            if isinstance(before, dict)
            for key in before
            if key not in held
        ]

    def _checked(self, place: Source, value: Any) -> Any:
        for leaf in pytree.tree_leaves(value, is_leaf=is_leaf):
            if not isinstance(leaf, torch.Tensor) and not is_constant(leaf):
                kind = type(leaf).__name__
                raise UnsupportedProgram(
                    f"`{place.path}` is assigned an instance of `{kind}` in the compiled function",
                    stage="capture",
                    fix="assign tensors and constants",
                )
        return value


def _place(key: int | str) -> Source:
    if isinstance(key, int):
        return Source("args", Given("args")).item(key)
    return Source("kwargs", Given("kwargs")).item(key, key)


def _entry(place: Source, key: Any) -> Source:
    """An item of a container, or an attribute of an object, whose dictionary is watched."""
    return place.item(key, f"{place.path}.{key}" if place.steps[-1] == _ATTRIBUTES else None)


def _containers(place: Source, value: Any) -> Iterator[tuple[Source, Any]]:
    if isinstance(value, (list, dict)):
        yield place, value
    elif type(value) in pytree.SUPPORTED_NODES and hasattr(value, "__dict__"):
        place, value = place.attribute(_ATTRIBUTES.name, place.path), vars(value)
        yield place, value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _containers(_entry(place, key), inner)
    elif isinstance(value, (list, tuple)):
        for position, inner in enumerate(value):
            yield from _containers(place.item(position), inner)
