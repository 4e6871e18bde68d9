"""Python numbers that are read while a program is traced."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import aotdist
from aotdist.torch_seam.proxies import node_here
from aotdist.trace.numbers.scalars import Scalars


def traced(program: Callable[[Any, torch.Tensor], Any]) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    """`program` of a number and a tensor; the number is read off the first argument while it is traced."""
    asked.clear()

    @functools.partial(aotdist.compile, backend="fx")
    def compiled(number: torch.Tensor, x: torch.Tensor) -> Any:
        scalars = Scalars([(number, REAL[0])], node_here)
        with scalars.followed():
            out = program(number.item(), x)
        guard = scalars.guard()
        asked.extend(() if guard is None else guard.holds)
        return out

    def call(number: torch.Tensor, x: torch.Tensor) -> Any:
        REAL[:] = [number]
        return compiled(number, x)

    return call


REAL: list[torch.Tensor] = []
asked: list[bool] = []
X = torch.linspace(-1, 1, 7)
PROGRAMS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "product": lambda n, x: x * n,
    "product from the left": lambda n, x: n * x,
    "quotient": lambda n, x: n / x.add(2),
    "power": lambda n, x: x.add(2) ** n,
    "arithmetic": lambda n, x: x * ((1 - 0.9**n) / (n + 2) - -n // 2 + abs(n) % 3),
    "functions": lambda n, x: x.add(math.sqrt(n), alpha=max(1, n - 1)).sub(min([n, 5.0, 2])),
    "division with rest": lambda n, x: x * sum(divmod(n, 2)) + divmod(5, n)[1],
    "type": lambda n, x: x * 2 if isinstance(n, (int, float)) and not isinstance(n, str) else x,
    "alpha": lambda n, x: x.sub(x, alpha=n * 0.3),
    "value": lambda n, x: x.addcdiv(x, x + 2, value=-n),
    "weight": lambda n, x: x.lerp(x.flip(0), n / 10),
    "lists": lambda n, x: torch._foreach_addcmul([x, x], [x, x], [x, x], [n, n * 2.0]),
    "bound": lambda n, x: x.clamp(max=n / 8),
    "tensor": lambda n, x: x + torch.tensor(n / 3),
    "filled": lambda n, x: x + torch.full((7,), n / 3),
    "in place": lambda n, x: x.clone().mul_(n).add_(n),
    "into itself": lambda n, x: x.clone().index_fill_(0, torch.tensor([1, 3]), n),
}


@pytest.mark.parametrize(
    "number", [torch.tensor(3.7, dtype=torch.float64), torch.tensor(4)], ids=["float", "int"]
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_those_of_python(name: str, number: torch.Tensor) -> None:
    program = PROGRAMS[name]
    call = traced(program)
    for value in (number, number + 1, number * 2):
        found, expected = call(value, X), program(value.item(), X)
        for a, b in (
            zip(found, expected, strict=True) if isinstance(found, (list, tuple)) else [(found, expected)]
        ):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_choices_are_noted() -> None:
    call = traced(lambda n, x: x if n > 3 and not n == 5 else -x)
    assert torch.equal(call(torch.tensor(4.0), X), X)
    assert asked == [True, False]


REFUSED: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "value": (lambda n, x: x * float(n), "needs the value of a number"),
    "conversion": (lambda n, x: x * (1 / float(x.norm())), r"`float\(tensor\)` has to be a number"),
    "several": (lambda n, x: x * sum(float(one) for one in (x[0], x[1])), "has to be a number"),
    "whole": (lambda n, x: x / 0.9 ** int(x.sum()), r"`int\(tensor\)` has to be a number"),
    "function": (lambda n, x: x * math.sqrt(x.norm()), "has to be a number"),
    "complex": (lambda n, x: x * complex(x.norm()).real, "has to be a number"),
    "truth": (lambda n, x: x if x.norm() else -x, "`__bool__` needs the value of a number"),
    "data of a tensor": (lambda n, x: x * torch.tensor([x.norm(), 1.0]), "needs the value of a number"),
    "floor": (lambda n, x: x * math.floor(n), "needs the value of a number"),
    "rounded": (lambda n, x: x * round(n), "needs the value of a number"),
    "key": (lambda n, x: x * {1: 0.1, 2: 0.2}.get(n, 0.5), "needs the value of a number"),
    "member": (lambda n, x: x if n in {2, 3} else -x, "needs the value of a number"),
    "text": (lambda n, x: x if str(n) == "2" else -x, "needs the value of a number"),
    "formatted": (lambda n, x: x if f"{n}" == "2" else -x, "needs the value of a number"),
    "array": (lambda n, x: x * np.exp(-n), "needs the value of a number"),
    "fraction": (lambda n, x: x * float(Fraction(1, n)), "needs the value of a number"),
    "range": (lambda n, x: [x for _ in range(n)], "needs the value of a number"),
    "size": (lambda n, x: torch.zeros(n), "`aten::zeros` needs the value of a number"),
    "slice": (lambda n, x: x[:n], "needs the value of a number"),
    "view": (lambda n, x: x.repeat(n), "needs the value of a number"),
    "shift": (lambda n, x: x.roll(n), "needs the value of a number"),
    "data": (lambda n, x: x if x.sum().item() > n else -x, "chooses by a number that it computes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_value_is_refused(name: str) -> None:
    program, match = REFUSED[name]
    with pytest.raises(aotdist.UnsupportedProgram, match=match):
        traced(program)(torch.tensor(2), X)
