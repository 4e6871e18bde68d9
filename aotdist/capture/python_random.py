"""Random numbers of Python's and NumPy's: what a program draws at capture would never be drawn again."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from aotdist.errors import UnsupportedProgram


@contextmanager
def no_python_random() -> Generator[None]:
    """Refuse what is drawn inside from the generators of `random` and `numpy.random`, and put them back.

    Raises:
        UnsupportedProgram: naming the generator.
    """
    before = _states()
    yield
    drawn = [name for name, state in _states().items() if state != before.get(name, state)]
    if drawn:
        if "random" in drawn:
            random.setstate(before["random"])
        if "numpy.random" in drawn:
            sys.modules["numpy"].random.set_state(before["numpy.random"])
        raise UnsupportedProgram(
            f"the program draws from the generator of `{drawn[0]}`, which compiled calls would not do again",
            stage="capture",
            fix="draw with `torch` and choose with `torch.where`, or draw before the call",
        )


def _states() -> dict[str, Any]:
    found: dict[str, Any] = {"random": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        found["numpy.random"] = (kind, tuple(keys.tolist()), *rest)
    return found
