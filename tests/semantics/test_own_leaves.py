"""Tensors that begin to require grad inside of a program, and views of them, are eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

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
    "a view under no_grad": lambda own: under_no_grad(lambda: own[0]),
    "views": lambda own: (own.t(), own[0], own.t()[1:]),
    "a view, and itself": lambda own: (own[0], own),
    "a view from before": lambda own: (own[0], under_no_grad(lambda: own.t())),
    "a view of a view that requires grad": lambda own: own[:2].detach().requires_grad_()[0],
    "written, then a view": lambda own: (under_no_grad(lambda: own.mul_(2)), own[0])[1],
}


def under_no_grad(fn: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return fn()


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("own", OWN)
@pytest.mark.parametrize("program", PROGRAMS)
def test_views(program: str, own: str, make: str) -> None:
    same_as_eager(lambda: Scene(lambda x: (PROGRAMS[program](OWN[own](x)), x * 2), (MAKERS[make](),)))


def test_gradients_of_views_arrive_at_the_leaf_that_they_share() -> None:
    def fn(x: torch.Tensor) -> Any:
        own = (x * 2).detach().requires_grad_()
        return own[0], own.t()[1:]

    row, columns = aotdist.compile(fn, backend="fx")(leaf(3, 4))
    assert row._base is columns._base
    (row.sum() + columns.sum()).backward()
    assert row._base.grad.tolist() == [[1, 2, 2, 2], [0, 1, 1, 1], [0, 1, 1, 1]]


@pytest.mark.parametrize("make", MAKERS)
def test_parameters(make: str) -> None:
    def fn(x: torch.Tensor) -> Any:
        return nn.Parameter(x * 2), nn.Parameter(x[0], requires_grad=False), nn.Parameter(x.t())[0]

    same_as_eager(lambda: Scene(fn, (MAKERS[make](),)))


@pytest.mark.parametrize(
    "program",
    [
        lambda own: (own, own * 2),
        lambda own: (own[0], own * 2),
        lambda own: (own[0], own[0].sin()),
        lambda own: Alias.apply(own),
    ],
)
def test_functions_of_them_beside_them_are_refused(program: Callable[[torch.Tensor], Any]) -> None:
    for make_own in OWN.values():
        compiled = aotdist.compile(lambda x, make_own=make_own: program(make_own(x)), backend="fx")
        with pytest.raises(UnsupportedProgram, match=r"`out\[\d\]` requires grad, and no input"):
            compiled(leaf(3, 4))


def test_views_of_a_view_from_before_a_write_are_refused() -> None:
    def fn(x: torch.Tensor) -> Any:
        own = x.detach()[1:].requires_grad_()
        view = own[0]
        under_no_grad(lambda: own.mul_(2))
        return view

    with pytest.raises(UnsupportedProgram, match="a leaf and a view of another, is written after views"):
        aotdist.compile(fn, backend="fx")(leaf(3, 4))


def test_what_lies_inside_of_a_view_of_a_leaf_is_written() -> None:
    """The view is a leaf itself, and autograd takes what lies inside for no view of it."""

    def fn(x: Any) -> torch.Tensor:
        part = under_no_grad(lambda: x.t()).b.t()
        part.add_(1)
        return part

    same_as_eager(lambda: Scene(fn, (two(3, 4).requires_grad_(),)))
