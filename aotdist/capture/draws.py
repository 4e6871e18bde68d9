"""What a program draws at capture would never be drawn again: random numbers of Python's, items of iterators.

The generators of `random` and `numpy.random` belong to all threads, so the functions that draw from them are
refused in the one that captures. A function that was bound before (`from random import random`) is not heard;
so a generator that the program reaches was drawn from if it is in another state afterwards. Of iterators and
data loaders from before the call nothing may be taken at all.
"""

from __future__ import annotations

import builtins
import functools
import pickle
import random
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

from aotdist.capture.code import is_users_class
from aotdist.capture.source import Source
from aotdist.errors import AotdistError, UnsupportedProgram
from aotdist.torch_seam.patches import replaced_here

_SHARED: tuple[tuple[str, Any, Any], ...] = (
    ("`random`", random, getattr(random.random, "__self__")),  # noqa: B009 (to type checkers it has none)
    ("`numpy.random`", np.random, getattr(np.random.rand, "__self__")),  # noqa: B009
)
"""Name and module of what draws from a generator that all threads share, and the generator."""


def is_python_generator(value: Any) -> bool:
    """Whether it is a generator of Python's or NumPy's."""
    return isinstance(value, (random.Random, np.random.Generator, np.random.RandomState))


@contextmanager
def no_python_random(own: Iterable[tuple[str, Any]]) -> Generator[None]:
    """Refuse what is drawn inside from generators of Python's and NumPy's; they are left as they were.

    Args:
        own: generators that the program reaches, by name.

    Raises:
        UnsupportedProgram: naming the generator.
    """
    names = {id(generator): f"`{name}`" for name, generator in own}
    names |= {id(generator): f"the generator of {name}" for name, _, generator in _SHARED}
    reached = {id(generator): generator for _, generator in own}
    before = [(one, _pickled_state(one)) for one in reached.values()]
    with ExitStack() as stack:
        for _, module, generator in _SHARED:
            if id(generator) not in reached:
                refuse = functools.partial(_refuse, names[id(generator)])
                for owner, name in _functions_of(module, generator):
                    stack.enter_context(replaced_here(owner, name, refuse))
        try:
            yield
        except AotdistError:
            _put_back(before)
            raise
    for drawn in _put_back(before):
        _refuse(names[id(drawn)])


def _refuse(name: str, *_: Any, **__: Any) -> Any:
    raise UnsupportedProgram(
        f"the program draws from {name}, which compiled calls would not do again",
        stage="capture",
        fix="draw with `torch` and choose with `torch.where`, or draw before the call",
    )


def _functions_of(module: Any, generator: Any) -> Iterator[tuple[Any, str]]:
    """Owners and names of the functions that draw from the generator of a module."""
    if isinstance(generator, random.Random):
        yield from ((generator, name) for name in ("random", "getrandbits"))  # which all others call
    for name, function in list(vars(module).items()):
        if getattr(function, "__self__", None) is generator and function.__name__ not in _OF_STATES:
            yield module, name


_OF_STATES = ("getstate", "setstate", "get_state", "set_state")


def _put_back(before: Iterable[tuple[Any, bytes]]) -> list[Any]:
    """Restore the states of the generators that were drawn from; returns these generators."""
    drawn = [(generator, state) for generator, state in before if _pickled_state(generator) != state]
    for generator, state in drawn:
        _core(generator).__setstate__(pickle.loads(state))
    return [generator for generator, _ in drawn]


def _pickled_state(generator: Any) -> bytes:
    return pickle.dumps(_core(generator).__getstate__())  # as bytes: no `==` compares states with arrays


def _core(generator: Any) -> Any:
    """What keeps the state of a generator, and pickles it: of NumPy's `Generator`, its `BitGenerator`."""
    return getattr(generator, "bit_generator", generator)


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
