"""Random numbers of Python's and NumPy's: what a program draws at capture would never be drawn again."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from aotdist.errors import AotdistError, UnsupportedProgram


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

    def __init__(self, name: str, state: Callable[[], Any], set_state: Callable[[Any], None]) -> None:
        self.name, self._state, self._set_state = name, state, set_state
        self._before = copy.deepcopy(state())

    def has_drawn(self) -> bool:
        """Whether its state is another one now; arrays are in it, which no `==` compares."""
        return pickle.dumps(self._state()) != pickle.dumps(self._before)

    def put_back(self) -> None:
        """Give it the state that it had."""
        self._set_state(self._before)


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
