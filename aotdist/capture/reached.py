"""What a callable can reach, as `aotdist.capture.reach` finds it, and the constants that a call checks."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aotdist.capture.source import Applied, Source


@dataclass(frozen=True, slots=True)
class Reached:
    """What the walk found.

    Args:
        modules: outermost modules, each with its place.
        tensors: tensors outside of modules.
        constants: constants, with the value that they have now; those of modules are not among them.
        identities: functions, built-in ones too, modules, classes, and other objects on whose identity the
            program depends.
        again: further places of an object that was found before, each with the first place.
        owners: objects whose attributes the program may reassign: arguments, and tensors of the user's
            classes, are some.
        containers: lists and dictionaries whose items the program may reassign.
        wholes: sets and deques, which the program may change.
        assigned: variables, and attributes of classes, that the program may assign without reading them,
            existing or not.
        generators: random generators.
        python_generators: those of Python's and NumPy's, which the program may not draw from.
        caches: functions that keep what they return (`functools.lru_cache`).
        clocks: what it may read the time by (`time.time`).
        names: attributes that the code reads, of any object; None if it may read any (`getattr`),
            or ask for any (`hasattr`).
    """

    modules: tuple[tuple[Source, nn.Module], ...]
    tensors: tuple[tuple[Source, torch.Tensor], ...]
    constants: tuple[tuple[Source, Any], ...]
    identities: tuple[tuple[Source, Any], ...]
    again: tuple[tuple[Source, Source], ...]
    owners: tuple[tuple[Source, Any], ...]
    containers: tuple[tuple[Source, list[Any] | dict[Any, Any]], ...]
    wholes: tuple[tuple[Source, set[Any] | deque[Any]], ...]
    assigned: tuple[Source, ...]
    generators: tuple[torch.Generator, ...]
    python_generators: tuple[tuple[str, Any], ...]
    caches: tuple[Any, ...]
    clocks: tuple[str, ...]
    names: frozenset[str] | None


def constants_but(
    reached: Reached, open_: Container[tuple[int, Any]], inputs: Container[tuple[int, Any]]
) -> Iterator[Source]:
    """The places of constants, without those that may differ from call to call.

    Of a container that holds one that may differ, the keys and the other items are constants by themselves.

    Args:
        reached: has the constants.
        open_: places that may differ, by `Source.spot`.
        inputs: places that are known to hold tensors, by the same.
    """
    for source, _ in reached.constants:
        if source.steps[-1] == Applied(is_tensor) and source.owner().spot() in inputs:
            continue
        if not open_:
            yield source
        elif (whole := source.container()) is not None and source.steps[-1] == Applied(items_of):
            held = whole.read()
            items = [whole.item(key) for key in keys_of(held)]
            kept = [item for item in items if item.spot() not in open_]
            yield from [source] if len(kept) == len(items) else [whole.applied(keys_of, source.path), *kept]
        elif source.spot() not in open_:
            yield source


def is_tensor(value: Any) -> bool:
    """Whether `value` is a tensor; a program may ask that of a value that it does not compute with."""
    return isinstance(value, torch.Tensor)


def items_of(container: Any) -> tuple[Any, ...]:
    """What a list, tuple or dictionary holds, as a tuple."""
    return tuple(container.items()) if isinstance(container, Mapping) else tuple(container)


def keys_of(container: Any) -> tuple[Any, ...]:
    """The keys of a dictionary, or the indices of a list or tuple, as a tuple."""
    return tuple(container) if isinstance(container, Mapping) else tuple(range(len(container)))
