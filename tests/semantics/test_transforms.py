"""`torch.func` transforms inside of compiled functions, and around them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import aotdist
from tests.semantics.observation import Scene, same_as_eager


def loss(row: torch.Tensor) -> torch.Tensor:
    return (row.sin() * row).sum()


class Halved(torch.autograd.Function):
    """Its backward is not its forward's derivative, so that nobody can make it up."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 2


INSIDE: dict[str, Callable[[torch.Tensor], object]] = {
    "vmap": lambda x: vmap(lambda row: row.sin().sum())(x),
    "vmap with other dims": lambda x: vmap(lambda row: row * 2, in_dims=1, out_dims=1)(x),
    "grad": lambda x: grad(loss)(x) * x,
    "gradients by sample": lambda x: vmap(grad(loss))(x),
    "an autograd.Function": lambda x: grad(lambda x: loss(Halved.apply(x)))(x),
    "an autograd.Function by sample": lambda x: vmap(grad(lambda row: loss(Halved.apply(row))))(x),
    "jacrev": lambda x: jacrev(lambda x: x.sin().sum(0))(x),
    "hessian": lambda x: hessian(loss)(x[0]),
    "jvp": lambda x: jvp(torch.sin, (x,), (x,))[1],
    "numbers beside single elements": lambda x: vmap(lambda e: 1 - (e * 2.5 + 1).pow(2) / 3)(x[0]),
    "numbers of another kind": lambda x: vmap(lambda e: (e > 0) * 2 + e.long() * 0.1)(x[0]),
    "numbers beside 16 bits": lambda x: vmap(lambda e: e.bfloat16() * 2.3)(x[0]),
    "gradients of scaled losses": lambda x: vmap(grad(lambda row: loss(row) * 2))(x),
    "numbers written to single elements": lambda x: vmap(lambda e: e.sin().mul_(2).add_(0.1))(x[0]),
}


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("name", INSIDE)
def test_inside(name: str, around: Callable) -> None:
    same_as_eager(lambda: Scene(INSIDE[name], (torch.randn(2, 3, requires_grad=True),)), around=around)


WITH_ZEROS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a Laplacian": lambda x: vmap(hessian(lambda row: (MATRIX @ row).tanh().sum()))(x),
    "a Hessian of a product": lambda x: hessian(lambda x: (x @ MATRIX).sin().sum())(x),
    "a Jacobian of a Jacobian": lambda x: vmap(jacfwd(jacfwd(lambda row: MATRIX @ row * row[0])))(x),
    "a part without a derivative": lambda x: jvp(lambda x: x * 2 + MATRIX[:2].cos(), (x,), (x.sin(),))[1],
    "a derivative of nothing": lambda x: x * jvp(lambda y: MATRIX[:2] + y.round(), (x,), (x,))[1],
    "a sign": lambda x: vmap(jacfwd(lambda row: row.sgn() * row.sum()))(x),
}
"""Their forward-mode derivatives are made of zeros that have no memory."""
MATRIX = torch.arange(9.0).view(3, 3) / 9


@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning")  # Inductor's
@pytest.mark.parametrize("backend", ["fx", "inductor"])
def test_derivatives_made_of_zeros(backend: str) -> None:
    def squares(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([fn(x).square().mean() for fn in WITH_ZEROS.values()])

    found = []
    for fn in (squares, aotdist.compile(squares, backend=backend)):
        x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()
        values = fn(x)
        values.sum().backward()
        found.append((values, x.grad))
    tolerance = {"rtol": 0.0, "atol": 0.0} if backend == "fx" else {}
    torch.testing.assert_close(found[1], found[0], **tolerance)


class Held(nn.Module):
    """A module whose parameter and constant a transform of its own meets first."""

    def __init__(self, transform: Callable[["Held", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.layer = nn.Linear(3, 3)
        self.constant = torch.randn(2, 3)
        self.transform = transform

    def loss(self, row: torch.Tensor) -> torch.Tensor:
        return (row @ self.weight * self.constant[0]).sin().sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.transform(self, x)


FIRST_MET: dict[str, Callable[[Held, torch.Tensor], torch.Tensor]] = {
    "a constant in grad": lambda s, x: grad(lambda x: (x * s.constant).sin().sum())(x),
    "grad": lambda s, x: grad(s.loss)(x),
    "vmap": lambda s, x: vmap(lambda row: row @ s.weight)(x),
    "gradients by sample": lambda s, x: vmap(grad(s.loss))(x),
    "grad in grad": lambda s, x: grad(lambda x: s.loss(x) + grad(s.loss)(x * s.constant).sum())(x),
    "vjp": lambda s, x: vjp(lambda x: x @ s.weight, x)[1](s.constant)[0],
    "jacrev": lambda s, x: jacrev(lambda x: (x @ s.weight).sin())(x),
    "jacfwd": lambda s, x: jacfwd(lambda x: (x @ s.weight).sin())(x),
    "hessian": lambda s, x: hessian(s.loss)(x),
    "jvp": lambda s, x: jvp(lambda x: (x @ s.weight).sin(), (x,), (x,))[1],
    "a constant in jvp": lambda s, x: jvp(lambda x: x * s.constant, (x,), (x,))[1],
    "a layer": lambda s, x: vmap(grad(lambda row: s.layer(row).sin().sum()))(x),
    "written to": lambda s, x: vmap(lambda row: row.clone().mul_(s.weight[0]))(x),
    "under no_grad": lambda s, x: grad(lambda x: (x.sin() * torch.no_grad()(s.weight.sum)()).sum())(x),
    "batched by vmap": lambda s, x: vmap(lambda row, weight: row * weight)(x, s.weight[:2]),
    "a whole constant batched": lambda s, x: vmap(lambda row, other: row * other)(x, s.constant),
    "a layer batched": lambda s, x: vmap(lambda w, b: x @ w + b)(s.weight, s.layer.bias),
    "what grad is of": lambda s, x: grad(lambda w: (x @ w).sin().sum())(s.weight),
    "what jvp is at": lambda s, x: jvp(lambda y: y.sin() * x, (s.constant,), (x,))[1],
    "what jvp is along": lambda s, x: jvp(torch.sin, (x,), (s.constant,))[1],
    "returned by vmap": lambda s, x: vmap(lambda row: s.constant)(x) + vmap(lambda row: s.weight)(x)[:, :2],
    "parameters by name": lambda s, x: grad(lambda held: functional_call(s.layer, held, (x,)).sin().sum())(
        dict(s.layer.named_parameters())
    )["weight"],
}


@pytest.mark.parametrize("around", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("name", FIRST_MET)
def test_first_met_inside(name: str, around: Callable) -> None:
    """Tensors that the program reaches, and meets only where a transform is at work."""

    def build() -> list[Scene]:
        module = Held(FIRST_MET[name])
        return [Scene(module, (torch.randn(2, 3, requires_grad=True),)) for _ in range(2)]

    same_as_eager(build, around=around)


def test_a_global_met_inside() -> None:
    compiled = aotdist.compile(lambda x: grad(lambda row: (row * GLOBAL).sin().sum())(x), backend="fx")
    x = torch.ones(3)
    for _ in range(2):
        assert torch.equal(compiled(x), (x * GLOBAL).cos() * GLOBAL)
        GLOBAL.add_(1)


GLOBAL = torch.arange(3.0)


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
