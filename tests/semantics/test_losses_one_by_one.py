"""Backwards of several results of one call, one after the other, without `retain_graph`."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import aotdist

Told = tuple[list[str], list[torch.Tensor | None]]


def branch() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Apart(nn.Module):
    """Results that have nothing in common."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = branch(), branch(), branch()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.first(x), self.second(x), self.third(x)


class Trunk(Apart):
    """Two of three share an operation that saves something."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.first(x)
        return hidden.sin(), hidden.cos(), self.second(x)


class Weights(Apart):
    """They share a parameter, and an operation that saves nothing."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = self.first[0].weight + 1
        return (x @ weight.t()).sin(), (x @ weight.t()).cos(), self.first(x)


def run(make: Callable[[], nn.Module], backend: str | None, order: Sequence[Sequence[int]]) -> Told:
    torch.manual_seed(0)
    model = make()
    if backend is not None:
        aotdist.compile(model, backend=backend)
    results, said = model(torch.linspace(-1, 1, 12).view(3, 4)), list[str]()
    for together in order:
        try:
            sum(results[k].square().sum() for k in together).backward()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said, [param.grad for param in model.parameters()]


ORDERS = [
    *([[k] for k in order] for order in itertools.product(range(3), repeat=3)),
    [[0, 1], [2]],
    [[2], [0, 1, 2]],
]


@pytest.mark.parametrize("make", [Apart, Trunk, Weights])
@pytest.mark.parametrize("backend", ["fx", "inductor"])
def test_as_in_eager(make: Callable[[], nn.Module], backend: str) -> None:
    for order in ORDERS if backend == "fx" else ORDERS[3:9]:
        (theirs, their_grads), (ours, our_grads) = run(make, None, order), run(make, backend, order)
        assert ours == theirs, order
        for mine, eager in zip(our_grads, their_grads, strict=True):
            assert (mine is None) == (eager is None)
            if mine is not None and eager is not None:
                exact = backend == "fx"
                torch.testing.assert_close(mine, eager, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


def test_what_was_written_since_is_told() -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), y.sin()

    for call in (program, aotdist.compile(program, backend="fx")):
        x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        first, second = call(x, y)
        first.sum().backward()
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError):
            second.sum().backward()


def test_nothing_is_kept_alive() -> None:
    """What is kept for others goes with the results."""
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    first, second = aotdist.compile(lambda x, y: (x.exp(), y.exp()), backend="fx")(x, y)
    first.sum().backward()
    gone = weakref.ref(second.grad_fn)
    gc.disable()
    try:
        del first, second
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("retains", [False, True])
def test_a_step_in_between(retains: bool) -> None:
    """An optimizer writes what only the first loss needed, as a critic's does beside an actor."""
    grads: list[list[torch.Tensor]] = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = Apart()
        if compiles:
            aotdist.compile(model, backend="fx")
        first, second, _ = model(torch.ones(3, 4))
        first.square().sum().backward(retain_graph=retains)
        torch.optim.SGD(model.first.parameters(), 0.1).step()
        second.square().sum().backward()
        grads.append([param.grad for param in (*model.first.parameters(), *model.second.parameters())])
    assert all(map(torch.equal, *grads))


def shows(x: torch.Tensor) -> torch.Tensor:
    return x[1:].view(-1)


SAVING_OR_NOT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sums": lambda x: x + x,
    "negates": lambda x: -x,
    "shows": shows,
    "means": lambda x: x.mean(),
    "joins": lambda x: torch.cat([x, x]),
    "scales": lambda x: x * 2,
    "saves a result": torch.exp,
    "saves an input": torch.sin,
    "saves a constant": lambda x: x * torch.ones(4),
    "recomputes": lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False),
}


@pytest.mark.parametrize("name", SAVING_OR_NOT)
def test_a_graph_that_saves_nothing_may_be_gone_through_again(name: str) -> None:
    told: list[tuple[str, torch.Tensor | None]] = []
    for fn in (SAVING_OR_NOT[name], aotdist.compile(SAVING_OR_NOT[name], backend="fx")):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        loss, said = fn(x), ""
        start = torch.ones_like(loss)
        loss.backward(start)
        try:
            loss.backward(start)
        except RuntimeError as error:
            said = str(error)[:40]
        told.append((said, x.grad))
    (eager, expected), (ours, found) = told
    assert ours == eager
    assert expected is not None and found is not None and torch.equal(expected, found)


def test_results_that_save_nothing_one_by_one() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * 2).sum(), (w * 3).sum()

    for fn in (program, aotdist.compile(program, backend="fx")):
        x, w = (torch.ones(3, requires_grad=True) for _ in range(2))
        first, second = fn(x, w)
        first.backward()
        second.backward()
        assert x.grad is not None and w.grad is not None
        assert (x.grad.tolist(), w.grad.tolist()) == ([2.0] * 3, [3.0] * 3)
        with pytest.raises(RuntimeError, match="a second time"):
            first.backward()
