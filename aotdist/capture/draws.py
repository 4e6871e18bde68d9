"""What a program draws at capture would never be drawn again: random numbers of Python's, items of iterators.

A generator of Python's or NumPy's that is in another state afterwards was drawn from. Those of `random` and
`numpy.random` belong to all threads, so the functions that draw are listened to in the one that captures. A
function that was bound before (`from random import random`) is not heard; a program that reaches one may have
drawn. Of iterators and data loaders from before the call nothing may be taken at all.
"""

from __future__ import annotations

import builtins
import copy
import pickle
import random
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.utils.data import DataLoader

from aotdist.capture.code import is_users_class
from aotdist.capture.source import Source
from aotdist.errors import AotdistError, UnsupportedProgram
from aotdist.torch_seam.patches import replaced_here


def is_python_generator(value: Any) -> bool:
    """Whether it is a generator of Python's or NumPy's."""
    numpy = sys.modules.get("numpy")
    kinds = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState)
    return isinstance(value, (random.Random, *kinds))


@contextmanager
def no_python_random(own: Iterable[tuple[str, Any]]) -> Generator[None]:
    """Refuse what is drawn inside from generators of Python's and NumPy's, and put them back.

    Args:
        own: generators that the program reaches, by name, besides those of `random` and `numpy.random`.

    Raises:
        UnsupportedProgram: naming the generator.
    """
    watched = [_Watched("the generator of `random`", random.getstate, random.setstate)]
    if "numpy" in sys.modules:
        shared = sys.modules["numpy"].random
        watched.append(_Watched("the generator of `numpy.random`", shared.get_state, shared.set_state))
    own = list(own)
    with ExitStack() as stack:
        for one in watched:
            stack.enter_context(one.listening([generator for _, generator in own]))
        watched += [_of(name, generator) for name, generator in own]
        try:
            yield
        except AotdistError:
            _put_back(watched)
            raise
    if drawn := _put_back(watched):
        raise UnsupportedProgram(
            f"the program draws from {drawn[0].name}, which compiled calls would not do again",
            stage="capture",
            fix="draw with `torch` and choose with `torch.where`, or draw before the call",
        )


class _Watched:
    """A generator, with the state that it had."""

    def __init__(self, name: str, state: Any, set_state: Callable[[Any], None]) -> None:
        self.name, self._state, self._set_state = name, state, set_state
        self._before = copy.deepcopy(state())
        self._may_have_drawn = True

    def has_drawn(self) -> bool:
        """Whether its state is another one now; arrays are in it, which no `==` compares."""
        return self._may_have_drawn and pickle.dumps(self._state()) != pickle.dumps(self._before)

    def put_back(self) -> None:
        """Give it the state that it had."""
        self._set_state(self._before)

    @contextmanager
    def listening(self, reached: Iterable[Any]) -> Generator[None]:
        """Other threads may draw from it, too: listen to what this one draws inside.

        Args:
            reached: generators that the program reaches: it may draw from these without being heard.
        """
        generator = self._state.__self__
        self._may_have_drawn = any(generator is one for one in reached)
        with ExitStack() as stack:
            for owner, name in () if self._may_have_drawn else _functions_of(generator):
                stack.enter_context(replaced_here(owner, name, self._draw))
            yield

    def _draw(self, draw: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._may_have_drawn = True
        return draw(*args, **kwargs)


def _functions_of(generator: Any) -> Iterator[tuple[Any, str]]:
    """Owners and names of the functions that draw from the generator of a module."""
    is_pythons = isinstance(generator, random.Random)
    if is_pythons:
        yield from ((generator, name) for name in ("random", "getrandbits"))  # which all others call
    module = random if is_pythons else sys.modules["numpy"].random
    for name, function in list(vars(module).items()):
        if getattr(function, "__self__", None) is generator and function.__name__ not in _OF_STATES:
            yield module, name


_OF_STATES = ("getstate", "setstate", "get_state", "set_state")


def _put_back(watched: Iterable[_Watched]) -> list[_Watched]:
    """Those that have drawn, which now have the state again that they had."""
    drawn = [one for one in watched if one.has_drawn()]
    for one in drawn:
        one.put_back()
    return drawn


def _of(name: str, generator: Any) -> _Watched:
    name = f"`{name}`"
    if isinstance(generator, random.Random):
        return _Watched(name, generator.getstate, generator.setstate)
    bits = getattr(generator, "bit_generator", None)
    if bits is None:
        return _Watched(name, generator.get_state, generator.set_state)
    return _Watched(name, lambda: bits.state, lambda state: setattr(bits, "state", state))


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
