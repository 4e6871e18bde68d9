"""Iterators and data loaders from before the call: what they give at capture would be that of every call."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader

from aotdist.capture.code import is_users_class
from aotdist.capture.source import Source
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.patches import replaced_here


@contextmanager
def none_advanced(reached: Iterable[tuple[Source, Any]]) -> Generator[None]:
    """Refuse to take an item inside, by `next` or by a loop over a loader, before anything is taken.

    Args:
        reached: what the program reaches; iterators of the user's own classes are Python that is traced.

    Raises:
        UnsupportedProgram: naming the iterator.
    """
    given = {id(value): source.path for source, value in reached if _gives(value)}

    def advance(original: Callable[..., Any], iterator: Any, *default: Any) -> Any:
        if id(iterator) in given:
            raise UnsupportedProgram(
                f"the program takes an item from `{given[id(iterator)]}`, and compiled calls would not",
                stage="capture",
                fix="take it before the call, and pass it as an argument",
            )
        return original(iterator, *default)

    if not given:
        yield
        return
    with replaced_here(builtins, "next", advance), replaced_here(DataLoader, "__iter__", advance):
        yield


def _gives(value: Any) -> bool:
    return isinstance(value, DataLoader) or (isinstance(value, Iterator) and not is_users_class(type(value)))
