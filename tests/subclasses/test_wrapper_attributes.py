"""Tensors inside of wrappers that the program replaces are replaced at every call, as in eager."""

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


def assign(tensor: torch.Tensor, name: str, value: Any) -> torch.Tensor:
    setattr(tensor, name, value)
    return tensor


def exchange(x: TwoTensor) -> torch.Tensor:
    x.a, x.b = x.b, x.a
    return x * 2


PROGRAMS: dict[str, Callable[[Any, Any], Any]] = {
    "by what it was": lambda x, y: assign(x, "a", x.a * 2) + 1,
    "by an input": lambda x, y: assign(x, "a", y) + 1,
    "by what is returned": lambda x, y: (z := y.sin(), assign(x, "b", z) * 2),
    "by each other": lambda x, y: exchange(x),
    "then written": lambda x, y: (assign(x, "a", y * 2).mul_(3), x + 1)[1],
    "after a write": lambda x, y: (x.mul_(3), assign(x, "a", y * 2) + 1)[1],
    "twice": lambda x, y: assign(assign(x, "a", y * 2), "a", x.a + 1) * 3,
    "under training": lambda x, y: assign(x, "a", x.a * 2) * 2,
}
MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "wrapper": two,
    "leaf": lambda: two().requires_grad_(),
}


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager(name: str, make: str) -> None:
    if make == "leaf" and "write" in name or make == "leaf" and "written" in name:
        pytest.skip("eager refuses to write a leaf")

    def build() -> Scene:
        x = MAKERS[make]()
        return Scene(PROGRAMS[name], (x, torch.randn(x.shape)))

    same_as_eager(build)


@pytest.mark.parametrize("view", [lambda x: x.t(), lambda x: x.detach(), lambda x: x.t()[0]])
def test_views_taken_afterwards_are_refused(view: Callable[[Any], Any]) -> None:
    def before(x: Any) -> Any:
        seen = view(x)
        x.a = x.a * 2
        return seen, view(x).clone()

    def afterwards(x: Any) -> Any:
        x.a = x.a * 2
        return view(x)

    def between(x: Any) -> Any:
        seen = afterwards(x)
        x.a = x.a * 2
        return seen

    same_as_eager(lambda: Scene(before, (two(),)))
    for program in (afterwards, between):
        with pytest.raises(UnsupportedProgram, match=r"taken after a tensor inside of it was replaced"):
            aotdist.compile(program, backend="fx")(two())


def test_replacing_what_is_inside_of_a_view_is_refused() -> None:
    def program(x: Any) -> Any:
        view = x.t()
        view.a = view.a * 2
        return view

    with pytest.raises(UnsupportedProgram, match=r"a tensor inside of it was replaced"):
        aotdist.compile(program, backend="fx")(two())
    same_as_eager(lambda: Scene(lambda x: program(x).clone(), (two(),)))


def test_inside_of_another() -> None:
    def program(x: Any, y: torch.Tensor) -> torch.Tensor:
        x.a.b = y.sin()
        return x + 1

    same_as_eager(lambda: Scene(program, (TwoTensor(two(), two()), torch.randn(two().shape))))


def test_of_a_parameter() -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.b = self.weight.b + 1
            return x * self.weight

    eager, compiled = Counted(), aotdist.compile(Counted(), backend="fx")
    for _ in range(3):
        results = [model(torch.ones(3)) for model in (eager, compiled)]
        assert torch.equal(results[0].b, results[1].b)
    assert compiled.weight.b.tolist() == eager.weight.b.tolist() == [4, 4, 4]


def test_by_what_is_no_tensor() -> None:
    x = two()
    with pytest.raises(UnsupportedProgram, match="the tensor `a` of a TwoTensor is replaced by a NoneType"):
        aotdist.compile(lambda x: (x * 2, assign(x, "a", None))[0], backend="fx")(x)
    assert isinstance(x.a, torch.Tensor)
