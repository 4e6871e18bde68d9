"""Programs that draw from generators which compiled calls would not draw from."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import aotdist
from aotdist.errors import UnsupportedProgram

DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy.random": lambda: float(np.random.rand()),
}


@pytest.mark.parametrize("name", DRAWS)
def test_refused_and_nothing_is_drawn(name: str) -> None:
    draw = DRAWS[name]
    random.seed(0)
    np.random.seed(0)
    expected = draw()
    random.seed(0)
    np.random.seed(0)
    with pytest.raises(UnsupportedProgram, match=f"draws from the generator of `{name}`"):
        aotdist.compile(lambda x: x * draw(), backend="fx")(torch.ones(2))
    assert draw() == expected


def test_the_line_that_draws_is_named() -> None:
    with pytest.raises(UnsupportedProgram, match=r"\n  at .*np\.random\.rand\(\)"):
        aotdist.compile(lambda x: x * float(np.random.rand()), backend="fx")(torch.ones(2))


LIBRARY = """
from random import random
from torch import nn

class NotInstalled:
    def __getattr__(self, name):
        raise ImportError(name)

optional = NotInstalled()

class LayerDrop(nn.Module):
    def forward(self, x):
        return x if random() < 0.5 else x * 2
"""


def test_a_library_that_imported_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that x_transformers drops: as captured, one would be dropped at every call, or never."""
    library = types.ModuleType("a_library")
    monkeypatch.setitem(sys.modules, library.__name__, library)
    exec(compile(LIBRARY, "/elsewhere/lib/python3.12/site-packages/a_library.py", "exec"), vars(library))
    before = random.getstate()
    with pytest.raises(UnsupportedProgram, match="draws from the generator of `random`"):
        aotdist.compile(library.LayerDrop(), backend="fx")(torch.ones(2))
    assert random.getstate() == before
    assert isinstance(library.random(), float)


OF_ONES_OWN: dict[str, Callable[[random.Random], float]] = {
    "random": lambda own: own.random(),
    "uniform": lambda own: own.uniform(0, 1),
    "randint": lambda own: own.randint(0, 3),
    "choice": lambda own: own.choice([1, 2]),
    "gauss": lambda own: own.gauss(0, 1),
}


@pytest.mark.parametrize("kind", OF_ONES_OWN)
def test_the_line_that_draws_from_a_generator_of_ones_own_is_named(kind: str) -> None:
    own, draw = random.Random(0), OF_ONES_OWN[kind]
    with pytest.raises(UnsupportedProgram, match=rf"from `own`.*\n  at .*test_python_random.*own\.{kind}\("):
        aotdist.compile(lambda x: x * draw(own), backend="fx")(torch.ones(2))
    assert draw(own) == draw(random.Random(0))


def test_a_generator_made_inside_draws_the_same_at_every_call() -> None:
    compiled = aotdist.compile(lambda x: x * random.Random(3).uniform(1, 2), backend="fx")
    assert (
        compiled(torch.ones(1)) == compiled(torch.ones(1)) == torch.ones(1) * random.Random(3).uniform(1, 2)
    )


class Drawing(torch.nn.Module):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(self.generator.random())


GENERATORS: dict[str, Callable[[], Any]] = {
    "of Python's": lambda: random.Random(0),
    "of NumPy's": lambda: np.random.default_rng(0),
    "of NumPy's, an old one": lambda: np.random.RandomState(0),
}


def test_a_generator_without_a_state() -> None:
    model = Drawing(random.SystemRandom())
    with pytest.raises(UnsupportedProgram, match="draws from the system's generator"):
        aotdist.compile(model, backend="fx")(torch.ones(2))


@pytest.mark.parametrize("kind", GENERATORS)
def test_generators_of_the_programs_own(kind: str) -> None:
    model, eager = Drawing(GENERATORS[kind]()), Drawing(GENERATORS[kind]())
    with pytest.raises(UnsupportedProgram, match="draws from `generator`"):
        aotdist.compile(model, backend="fx")(torch.ones(2))
    assert torch.equal(aotdist.disable(model)(torch.ones(2)), eager(torch.ones(2)))
