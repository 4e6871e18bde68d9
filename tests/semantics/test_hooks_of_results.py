"""Hooks that results and inputs get after a call: called with eager's gradient, or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import aotdist

Results = tuple[torch.Tensor, ...]


def apart(x: torch.Tensor, w: torch.Tensor) -> Results:
    return x * 3, w.sin(), x + w


def one_of_another(x: torch.Tensor, w: torch.Tensor) -> Results:
    y = x * 2
    return y, y * 3, w.exp(), y.sin()


def chain(x: torch.Tensor, w: torch.Tensor) -> Results:
    first = x.sin()
    second = first * w
    return second.exp(), first, second


def of_a_view(x: torch.Tensor, w: torch.Tensor) -> Results:
    y = x.exp()
    view = y[0]
    return y, view, view * 2, w * 1


@pytest.mark.parametrize("program", [apart, one_of_another, chain, of_a_view])
def test_called_as_in_eager(program: Callable[..., Results]) -> None:
    compiled = aotdist.compile(program, backend="fx")
    num_results = len(program(torch.ones(2, 3), torch.ones(2, 3)))
    names = list(range(num_results))
    chosen = [names, *([name] for name in names), *map(list, itertools.combinations(names, 2))]
    for order, some in itertools.product(itertools.permutations(names), chosen):
        assert heard(compiled, order, some) == heard(program, order, some), (order, some)


def heard(call: Callable[..., Results], order: tuple[Any, ...], some: list[Any]) -> list[Any]:
    """What hooks that are registered in this order hear, by tensor, if some tensors get a gradient."""
    log: list[Any] = []
    leaves = [torch.linspace(-1, 1, 6).view(2, 3).requires_grad_() for _ in range(2)]
    x, w = (leaf * 1 for leaf in leaves)
    held = {"x": x, "w": w, **dict(enumerate(call(x, w)))}
    for name in order:
        held[name].register_hook(lambda grad, name=name: log.append((name, grad.tolist())))
    sum(held[name].sum() for name in some).backward()
    return sorted(log, key=str)
