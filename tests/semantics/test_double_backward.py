"""Gradients of gradients. Equal to rounding: eager adds up in the middle what here comes from two nodes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import plain_tensors
from tests.semantics.meshes import sharded

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
    "draws random numbers": lambda x: torch.bernoulli(x.sigmoid()) * x.sin(),
    "whose old value": lambda x: (x.mul_(2), x.cos())[1],
}


@pytest.mark.parametrize("reason", OBSTACLES)
def test_what_stands_in_the_way_is_named(reason: str) -> None:
    compiled = aotdist.compile(OBSTACLES[reason], backend="fx")
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(UnsupportedProgram, match=reason):
        torch.autograd.grad(compiled(x * 1.0).sum(), x, create_graph=True)


def test_gradients_of_another_kind_are_named() -> None:
    x, w = TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_(), torch.ones(3, requires_grad=True)
    y = aotdist.compile(lambda x, w: x.sin() * w, backend="fx")(x, w)
    with pytest.raises(UnsupportedProgram, match="another kind of tensor"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


RANDOM: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x, w: F.dropout(x.sin() * w, 0.5) ** 2,
    "two dropouts": lambda x, w: F.dropout(F.dropout(x * w, 0.3).exp(), 0.5) * x,
    "rand_like": lambda x, w: (x * torch.rand_like(x) * w).sin(),
    "dropout in a checkpoint": lambda x, w: checkpoint(
        lambda x: F.dropout(x.sin(), 0.5) * w * x, x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_drawn_once(name: str, order: int) -> None:
    compiled = aotdist.compile(RANDOM[name], backend="fx")
    assert_close(derivatives(compiled, order), derivatives(RANDOM[name], order))
    expected = torch.get_rng_state()
    derivatives(RANDOM[name], order)
    assert torch.equal(torch.get_rng_state(), expected)


def of_wrappers(fn: Callable[..., torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    torch.manual_seed(0)
    x, w = (make(torch.randn(3, 4, dtype=torch.float64)).requires_grad_() for _ in range(2))
    y = fn(x, w)
    grads = torch.autograd.grad(y.sum(), (x, w), create_graph=True)
    again = torch.autograd.grad(grads[0].sin().sum() + grads[1].exp().sum(), (x, w))
    return [plain for grad in (*grads, *again) for plain in plain_tensors(grad)]


OF_WRAPPERS = ("pointwise", "results that are saved", "a detached part", "a write of its own")


@pytest.mark.parametrize("name", OF_WRAPPERS)
def test_wrappers(name: str) -> None:
    def two(plain: torch.Tensor) -> torch.Tensor:
        return TwoTensor(plain, plain.cos())

    compiled = aotdist.compile(PROGRAMS[name], backend="fx")
    assert_close(of_wrappers(compiled, two), of_wrappers(PROGRAMS[name], two))


@pytest.mark.parametrize("name", OF_WRAPPERS)
def test_dtensors(name: str, mesh: DeviceMesh) -> None:
    compiled = aotdist.compile(PROGRAMS[name], backend="fx")
    eager = of_wrappers(PROGRAMS[name], lambda plain: sharded(mesh, plain))
    assert_close(of_wrappers(compiled, lambda plain: sharded(mesh, plain)), eager)
