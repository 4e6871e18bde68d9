"""Gradients of gradients. Equal to rounding: eager adds up in the middle what here comes from two nodes."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import UnsupportedProgram

PROGRAMS: dict[str, Callable[..., torch.Tensor]] = {
    "pointwise": lambda x, w: (x.sin() * w).exp(),
    "matmul": lambda x, w: (x @ w.t()).tanh(),
    "softmax": lambda x, w: (x @ w.t()).softmax(-1),
    "results that are saved": lambda x, w: x.relu().sigmoid() * w.exp(),
    "a detached part": lambda x, w: x * x.detach() * w,
    "under no_grad": lambda x, w: x * _squared(x) * w,
    "linear": lambda x, w: x @ w.t(),
    "a write of its own": lambda x, w: (x * 2).mul_(w).sin_(),
    "views": lambda x, w: torch.cat([x[1:] * w[:-1], x[:1]]).t().reshape(3, 4) ** 3,
    "norm": lambda x, w: F.layer_norm(x, (4,), w[0]) * x,
}


def _squared(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * x


def derivatives(fn: Callable[..., torch.Tensor], order: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, w = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    found: list[torch.Tensor] = []
    y = fn(x, w)
    for _ in range(order):
        grads = torch.autograd.grad(y.square().sum(), (x, w), create_graph=True)
        found += grads
        y = sum(grad.sin() for grad in grads)
    y.sum().backward()
    return [*found, x.grad, w.grad]


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager(name: str, order: int) -> None:
    compiled = aotdist.compile(PROGRAMS[name], backend="fx")
    assert_close(derivatives(compiled, order), derivatives(PROGRAMS[name], order))
    assert len(compiled.artifacts) == 1


def test_a_gradient_penalty_trains() -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 1)).double()
    models = (critic, aotdist.compile(copy.deepcopy(critic), backend="fx"))
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for _ in range(4):
        batch, losses = torch.randn(6, 3, dtype=torch.float64), []
        for model, optimizer in zip(models, optimizers, strict=True):
            x = batch.clone().requires_grad_()
            y = model(x).sum()
            (grad,) = torch.autograd.grad(y, x, create_graph=True)
            losses.append((grad.norm(dim=1) - 1).square().mean() + y)
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert_close(*losses)
    assert_close(*(list(model.parameters()) for model in models))


def test_gradgradcheck() -> None:
    compiled = aotdist.compile(lambda x, w: (x.sin() @ w).tanh(), backend="fx")
    x, w = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradgradcheck(compiled, (x, w))


def test_one_output_of_several() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.exp()

    second = []
    for fn in (program, aotdist.compile(program, backend="fx")):
        x = torch.ones(3, requires_grad=True)
        (grad,) = torch.autograd.grad(fn(x)[1].sum(), x, create_graph=True)
        second += torch.autograd.grad(grad.sum(), x)
    assert torch.equal(*second)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


OBSTACLES = {
    "autograd function `TwiceBackward`": lambda x: Twice.apply(x).sin(),
    "draws random numbers": lambda x: F.dropout(x, 0.5).sin(),
    "whose old value": lambda x: (x.mul_(2), x.cos())[1],
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_what_stands_in_the_way_is_named(reason: str) -> None:
    compiled = aotdist.compile(OBSTACLES[reason], backend="fx")
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(UnsupportedProgram, match=reason):
        torch.autograd.grad(compiled(x * 1.0).sum(), x, create_graph=True)


def test_wrappers_are_named() -> None:
    x = TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_()
    y = aotdist.compile(lambda x: x.sin(), backend="fx")(x)
    with pytest.raises(UnsupportedProgram, match="tensors of type TwoTensor"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
