"""Tensors that begin to require grad inside of a program are no results of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.functions import Alias
from tests.semantics.makers import leaf, plain, two
from tests.semantics.observation import Scene, same_as_eager

MAKERS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: plain(3, 4),
    "leaf": lambda: leaf(3, 4),
    "non-leaf": lambda: leaf(3, 4) * 1.5,
    "wrapper": lambda: two(3, 4).requires_grad_(),
}
OWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of an input": lambda x: x.detach().requires_grad_(),
    "of a view": lambda x: x[1:].detach().requires_grad_(),
    "of a result": lambda x: x.sin().detach().requires_grad_(),
    "of a function's result": lambda x: Alias.apply(x).detach().requires_grad_(),
    "a view itself": lambda x: x.detach()[1:].requires_grad_(),
    "one of several": lambda x: x.detach().split(2)[0].requires_grad_(),
    "of nothing": lambda x: torch.zeros(3, 4).requires_grad_(),
    "made as one": lambda x: torch.ones(3, 4, requires_grad=True),
    "made like an input": lambda x: torch.randn_like(x, requires_grad=True),
}
PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda own: own,
    "a view": lambda own: own[0],
    "views": lambda own: (own.t(), own[0]),
    "beside a function of it": lambda own: (own, own * 2),
}


def under_no_grad(fn: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return fn()


@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("program", PROGRAMS)
def test_they_are_refused_as_results(program: str, own: str) -> None:
    compiled = aotdist.compile(lambda x: (x * 2, PROGRAMS[program](OWN[own](x))), backend="fx")
    for make in MAKERS.values():
        with pytest.raises(UnsupportedProgram, match=r"`out\[\d\](\.base)?` requires grad, and no input"):
            compiled(make())


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("own", OWN)
def test_what_has_no_gradient_is_returned(own: str, make: str) -> None:
    def fn(x: torch.Tensor) -> Any:
        leaf = OWN[own](x)
        (grad,) = torch.autograd.grad(leaf.sin().sum(), leaf)
        return grad, leaf.detach(), x * 2

    same_as_eager(lambda: Scene(fn, (MAKERS[make](),)))


def test_what_lies_inside_of_a_view_of_a_leaf_is_written() -> None:
    """The view is a leaf itself, and autograd takes what lies inside for no view of it."""

    def fn(x: Any) -> torch.Tensor:
        part = under_no_grad(lambda: x.t()).b.t()
        part.add_(1)
        return part

    same_as_eager(lambda: Scene(fn, (two(3, 4).requires_grad_(),)))
