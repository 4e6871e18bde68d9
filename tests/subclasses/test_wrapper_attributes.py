"""Tensors inside of wrappers that the program replaces are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.makers import two
from tests.semantics.observation import Scene, same_as_eager


def exchange(x: TwoTensor) -> None:
    x.a, x.b = x.b, x.a


REPLACES: dict[str, Callable[[Any], Any]] = {
    "by what it was": lambda x: setattr(x, "a", x.a * 2),
    "by each other": exchange,
    "by what is no tensor": lambda x: (x * 2, setattr(x, "a", None))[0],
    "twice": lambda x: (setattr(x, "a", x.a * 2), setattr(x, "a", x.a + 1)),
}


@pytest.mark.parametrize("make", [two, lambda: two().requires_grad_()], ids=["wrapper", "leaf"])
@pytest.mark.parametrize("name", REPLACES)
def test_of_an_input(name: str, make: Callable[[], Any]) -> None:
    x = make()
    a, b = x.a, x.b
    with pytest.raises(UnsupportedProgram, match="the tensor `a` inside of a TwoTensor is replaced"):
        aotdist.compile(REPLACES[name], backend="fx")(x)
    assert x.a is a and x.b is b


def test_of_a_view() -> None:
    def program(x: Any) -> Any:
        view = x.t()
        view.a = view.a * 2
        return view

    with pytest.raises(UnsupportedProgram, match=r"a tensor inside of it was replaced"):
        aotdist.compile(program, backend="fx")(two())
    same_as_eager(lambda: Scene(lambda x: program(x).clone(), (two(),)))


def test_inside_of_another() -> None:
    def program(x: Any) -> None:
        x.a.b = x.a.b.sin()

    with pytest.raises(UnsupportedProgram, match=r"the tensor `a.b` inside of a TwoTensor is replaced"):
        aotdist.compile(program, backend="fx")(TwoTensor(two(), two()))


def test_one_that_is_put_back_and_one_that_is_written() -> None:
    def program(x: Any) -> torch.Tensor:
        own = x.a
        x.a = own * 2
        y = x + 1
        x.a = own
        x.b.mul_(3)
        return y

    same_as_eager(lambda: Scene(program, (two(),)))


def test_of_a_parameter() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.b = self.weight.b + 1
            return x * self.weight

    with pytest.raises(UnsupportedProgram, match="the tensor `b` inside of a TwoTensor is replaced"):
        aotdist.compile(Counted(), backend="fx")(torch.ones(3))
