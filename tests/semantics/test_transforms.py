"""`torch.func` transforms inside of compiled functions, and around them."""

from collections.abc import Callable

import pytest
import torch
from torch.func import grad, hessian, jacrev, jvp, vmap

import aotdist
from tests.semantics.observation import Scene, same_as_eager


def loss(row: torch.Tensor) -> torch.Tensor:
    return (row.sin() * row).sum()


INSIDE: dict[str, Callable[[torch.Tensor], object]] = {
    "vmap": lambda x: vmap(lambda row: row.sin().sum())(x),
    "vmap with other dims": lambda x: vmap(lambda row: row * 2, in_dims=1, out_dims=1)(x),
    "grad": lambda x: grad(loss)(x) * x,
    "gradients by sample": lambda x: vmap(grad(loss))(x),
    "jacrev": lambda x: jacrev(lambda x: x.sin().sum(0))(x),
    "hessian": lambda x: hessian(loss)(x[0]),
    "jvp": lambda x: jvp(torch.sin, (x,), (x,))[1],
}


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("name", INSIDE)
def test_inside(name: str, around: Callable) -> None:
    same_as_eager(lambda: Scene(INSIDE[name], (torch.randn(2, 3, requires_grad=True),)), around=around)


AROUND: dict[str, Callable[[Callable], torch.Tensor]] = {
    "grad": lambda fn: grad(fn)(torch.ones(3)),
    "vmap": lambda fn: vmap(fn)(torch.ones(2, 3)),
    "gradients by sample": lambda fn: vmap(grad(fn))(torch.ones(2, 3)),
    "jvp": lambda fn: jvp(fn, (torch.ones(3),), (torch.ones(3),))[1],
    "hessian": lambda fn: hessian(fn)(torch.ones(3)),
}


@pytest.mark.parametrize("name", AROUND)
def test_around(name: str) -> None:
    compiled = aotdist.compile(loss, backend="fx")
    assert torch.equal(AROUND[name](compiled), AROUND[name](loss))
    assert torch.equal(compiled(torch.ones(3)), loss(torch.ones(3))) and len(compiled.artifacts) == 1


def test_batched_gradients() -> None:
    compiled = aotdist.compile(lambda x: x.sin() * x, backend="fx")
    jacobians = []
    for fn in (lambda x: x.sin() * x, compiled):
        x = torch.linspace(0, 1, 3).requires_grad_()
        jacobians += torch.autograd.grad(fn(x), x, torch.eye(3), is_grads_batched=True)
    assert torch.equal(*jacobians)
