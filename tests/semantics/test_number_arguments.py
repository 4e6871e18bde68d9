"""Numbers among the arguments that change from call to call: a program for all where it takes a symbol."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.api import compiled_call

X = torch.arange(12.0).reshape(3, 4) / 7
INTS = (1, 2, 5, 0, -3, 7)
FLOATS = (0.5, 0.3, 1.7, 0.9, 2.0, 0.1)


def divides(x: torch.Tensor, number: float) -> torch.Tensor:
    return (x / number).softmax(-1)


def multiplies(x: torch.Tensor, number: float) -> torch.Tensor:
    return (x * number).sin() + number


def computes(x: torch.Tensor, number: float) -> torch.Tensor:
    return x * (number * 0.1 + 0.3)


def mixes(x: torch.Tensor, number: float) -> torch.Tensor:
    return x * (1 - (1 - number)) + (0.1 + number + 0.2) * x.sin() / (3 * number + number % 0.7 - 9)


def calls(x: torch.Tensor, number: float) -> torch.Tensor:
    warm = min(1.0, 0.1 + number**2 / 7.0) * math.exp(-number / 3) + math.sqrt(math.cos(number) ** 2)
    return x * warm + max(0.5, math.log1p(number + 4.0)) * (9 - number) ** 0.9


def takes_some(x: torch.Tensor, number: int) -> torch.Tensor:
    return x[:, :number].sum() + x.sum()


def chooses(x: torch.Tensor, number: float) -> torch.Tensor:
    return x.sin() if number < 3 else x.cos()


def raises(x: torch.Tensor, number: float) -> torch.Tensor:
    return (x + 1).pow(number)


def names(x: torch.Tensor, number: float) -> torch.Tensor:
    return x * len(f"{number}")


def looks_up(x: torch.Tensor, number: float) -> torch.Tensor:
    return x * {each: each + 1 for each in (*INTS, *FLOATS)}[number]


def reduces(x: torch.Tensor, number: int) -> torch.Tensor:
    return x.sum(number % 2)


def repeats(x: torch.Tensor, number: int) -> torch.Tensor:
    for _ in range(number):
        x = x.sin()
    return x


def returns(x: torch.Tensor, number: float) -> Any:
    return x.sin(), number, [number]


PROGRAMS: dict[tuple[Callable[..., Any], Sequence[float]], int] = {
    (divides, FLOATS): 2,
    (multiplies, FLOATS): 2,
    (multiplies, INTS): 2,
    (computes, INTS): 2,
    (computes, FLOATS): 2,
    (mixes, FLOATS): 2,
    (calls, FLOATS): 2,
    (calls, INTS): 2,
    (takes_some, (1, 2, 3, 4, 2, 3)): 3,
    (chooses, INTS): 3,
    (chooses, FLOATS): 6,
    (raises, FLOATS): 6,
    (names, INTS): 6,
    (looks_up, INTS): 6,
    (reduces, INTS): 6,
    (repeats, (1, 2, 3, 4, 5, 6)): 6,
    (returns, FLOATS): 2,
    (returns, INTS): 2,
}
"""With the most programs for six calls: more where the program needs the value of the number."""


@pytest.mark.parametrize(("program", "numbers"), PROGRAMS, ids=lambda each: getattr(each, "__name__", None))
def test_every_call_is_that_of_eager(program: Callable[..., Any], numbers: Sequence[float]) -> None:
    compiled = aotdist.compile(program, backend="fx")
    for number in numbers:
        x, ours = (X.clone().requires_grad_() for _ in range(2))
        expected, result = program(x, number), compiled(ours, number)
        if isinstance(expected, tuple):
            assert result[1:] == expected[1:] and type(result[1]) is type(number)
            expected, result = expected[0], result[0]
        assert torch.equal(result, expected)
        expected.sum().backward()
        result.sum().backward()
        assert torch.equal(ours.grad, x.grad)
    assert len(compiled.graphs) <= PROGRAMS[program, numbers]


@pytest.mark.parametrize(("program", "numbers"), [(divides, FLOATS), (multiplies, INTS)])
def test_by_inductor(program: Callable[..., Any], numbers: Sequence[float]) -> None:
    compiled = aotdist.compile(program, backend="inductor")
    for number in numbers:
        torch.testing.assert_close(compiled(X, number), program(X, number))
    assert len(compiled.graphs) == 2


@dataclass
class Batch:
    x: torch.Tensor
    temperature: float


def test_numbers_in_dictionaries_and_objects() -> None:
    def program(batch: Batch, options: dict[str, Any], *, scale: int) -> torch.Tensor:
        return batch.x / batch.temperature * options["weight"] + scale

    compiled = aotdist.compile(program, backend="fx")
    for at in range(1, 6):
        given = (Batch(X, at / 3), {"weight": at / 7, "name": "a"})
        assert torch.equal(compiled(*given, scale=at), program(*given, scale=at))
    assert len(compiled.graphs) == 2


def test_one_that_needs_its_value_leaves_the_others_symbols() -> None:
    def program(x: torch.Tensor, temperature: float, name: int) -> torch.Tensor:
        return x / temperature * len(f"{name:03}")

    compiled = aotdist.compile(program, backend="fx")
    compiled(X, 0.5, 0)
    for at in range(1, 6):
        assert torch.equal(compiled(X, at / 3, at % 2), program(X, at / 3, at % 2))
    assert len(compiled.graphs) <= 3


def test_sizes_change_beside_a_number_that_needs_its_value() -> None:
    def program(x: torch.Tensor, name: int) -> torch.Tensor:
        return x * len(f"{name:03}")

    compiled = aotdist.compile(program, backend="fx")
    for at in range(2, 8):
        x = torch.randn(at, 3)
        assert torch.equal(compiled(x, at % 2), program(x, at % 2))
    assert len(compiled.graphs) <= 4


def test_a_module_takes_a_temperature() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, temperature: float) -> torch.Tensor:
            return self.linear(x) / temperature

    module = Scaled()
    eager = module.forward
    aotdist.compile(module, backend="fx")
    for number in FLOATS:
        assert torch.equal(module(X, number), eager(X, number))
    assert len(compiled_call(module).graphs) == 2


def test_static_programs_are_one_a_value() -> None:
    compiled = aotdist.compile(divides, backend="fx", dynamic=False)
    for number in FLOATS[:3]:
        compiled(X, number)
    assert len(compiled.graphs) == 3


def test_the_warning_names_the_number() -> None:
    compiled = aotdist.compile(names, backend="fx")
    with pytest.warns(UserWarning, match=r"what keeps changing: `args\[1\]` \("):
        for number in range(9):
            compiled(X, number)
