"""Refuses random numbers of Python and NumPy, and items of iterators: only the capture would draw them.

All threads share the generators of `random` and `numpy.random`, so the functions that draw from them are
replaced for the thread that captures, also where the file of a module's class has imported them (`from random
import random`). Of generators that the program reaches, the states are compared, too. `next` and loops over
data loaders are refused for iterators from before the call.
"""

from __future__ import annotations

import builtins
import functools
import pickle
import random
import sys
import types
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import numpy as np
from torch import nn
from torch.utils.data import DataLoader

from aotdist.capture.code import is_users_class
from aotdist.capture.source import Source
from aotdist.capture.span_masks import span_masks
from aotdist.errors import AotdistError, UnsupportedProgram
from aotdist.origins import current_source_line
from aotdist.torch_seam.patches import all_replaced_here, replaced_here

_SHARED: tuple[tuple[str, Any, Any], ...] = (
    ("`random`", random, getattr(random.random, "__self__")),  # noqa: B009 (to type checkers it has none)
    ("`numpy.random`", np.random, getattr(np.random.rand, "__self__")),  # noqa: B009
)
"""Generators that all threads share: name, module with the functions that draw from it, generator."""


def is_python_generator(value: Any) -> bool:
    """Whether it is a generator of Python's or NumPy's that has a state: the system's has none."""
    classes = random.Random, np.random.Generator, np.random.RandomState
    return isinstance(value, classes) and not isinstance(value, random.SystemRandom)


@contextmanager
def no_python_random(own: Iterable[tuple[str, Any]], classes: Iterable[type[nn.Module]]) -> Generator[None]:
    """Refuse random numbers of Python and NumPy in this context; generators keep their states.

    Args:
        own: generators that the program reaches, by name.
        classes: of the program's modules, which may be of libraries.

    Raises:
        UnsupportedProgram: naming the generator.
    """
    names = {id(generator): f"`{name}`" for name, generator in own}
    names |= {id(generator): f"the generator of {name}" for name, _, generator in _SHARED}
    reached = {id(generator): generator for _, generator in own}
    before = [(one, _pickled_state(one)) for one in reached.values()]
    files = {sys.modules[cls.__module__] for cls in classes if cls.__module__ in sys.modules}

    def refuse_known(original: Callable[..., Any], generator: random.Random, *args: Any) -> Any:
        return _refuse(names[id(generator)]) if id(generator) in names else original(generator, *args)

    with ExitStack() as stack:
        for name in ("random", "getrandbits"):  # which all others call; a generator made inside may draw
            stack.enter_context(replaced_here(random.Random, name, refuse_known))
        for _, module, generator in _SHARED:
            if id(generator) not in reached:
                refuse = functools.partial(_refuse, names[id(generator)])
                for file in {module, *files}:
                    for name in _functions_of(file, generator):
                        stack.enter_context(replaced_here(file, name, refuse))
        for name in ("random", "getrandbits"):  # they leave no state by which draws could be noticed
            refuse = functools.partial(_refuse, "the system's generator")
            stack.enter_context(replaced_here(random.SystemRandom, name, refuse))
        stack.enter_context(all_replaced_here(*span_masks(files)))
        try:
            yield
        except AotdistError:
            _put_back(before)
            raise
    for drawn in _put_back(before):
        raise _drawn_from(names[id(drawn)])


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise _drawn_from(name, where=current_source_line() or None)


def _drawn_from(name: str, where: str | None = None) -> UnsupportedProgram:
    return UnsupportedProgram(
        f"the program draws from {name}, which compiled calls would not do again",
        where=where,
        stage="capture",
        fix="draw with `torch` and choose with `torch.where`, or draw before the call",
    )


def _functions_of(module: Any, generator: Any) -> Iterator[str]:
    """Names of the functions of a module that draw from its generator."""
    for name, function in list(vars(module).items()):
        # Other objects in a file may raise for each attribute (monai's packages that are not installed).
        is_method = isinstance(function, (types.MethodType, types.BuiltinMethodType))
        if is_method and function.__self__ is generator and function.__name__ not in _OF_STATES:
            yield name


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
    """Refuse `next` and loops over data loaders in this context, before an item is taken.

    Args:
        reached: what the program reaches; iterators of the user's own classes are traced as Python.

    Raises:
        UnsupportedProgram: naming the iterator.
    """
    iterators = {id(value): source.path for source, value in reached if _is_iterated(value)}

    def advance(original: Callable[..., Any], iterator: Any, *default: Any) -> Any:
        if id(iterator) in iterators:
            raise UnsupportedProgram(
                f"the program takes an item from `{iterators[id(iterator)]}`, and compiled calls would not",
                stage="capture",
                fix="take it before the call, and pass it as an argument",
            )
        return original(iterator, *default)

    if not iterators:
        yield
        return
    with replaced_here(builtins, "next", advance), replaced_here(DataLoader, "__iter__", advance):
        yield


def _is_iterated(value: Any) -> bool:
    return isinstance(value, DataLoader) or (isinstance(value, Iterator) and not is_users_class(type(value)))
