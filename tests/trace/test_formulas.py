"""A loss by the formula that eager chooses by data; gradients of products may round otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import aotdist

Program = Callable[..., torch.Tensor]


def gradients(program: Program, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """What a program gives, and the gradients of those of its inputs that have some."""
    leaves = [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]
    out = program(*leaves)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(out, wanted, weights, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


@pytest.mark.parametrize("shape", [(64, 9), (8, 9, 6), (4, 9, 3, 2), (9,)])
def test_of_weighted_smoothed_targets(shape: tuple[int, ...]) -> None:
    def program(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target, weight=weight, label_smoothing=0.1)

    compiled = aotdist.compile(program, backend="fx")
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(shape, requires_grad=True)
        target = torch.randint(0, 9, (shape[:1] + shape[2:]) if len(shape) > 1 else ())
        if len(shape) > 1:
            target[torch.rand(target.shape) > 0.6] = -100
        weight = torch.rand(9) + 0.1
        eager, ours = (gradients(f, x, target, weight) for f in (program, compiled))
        assert all(map(torch.equal, eager, ours)), seed


@pytest.mark.parametrize("program", [torch.prod, lambda x: x.prod(1), lambda x: x.prod(0, keepdim=True)])
@pytest.mark.parametrize("zero", [False, True])
def test_gradients_of_products_round_otherwise(program: Program, zero: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 7)
    x = (x.index_fill(1, torch.tensor([2]), 0.0) if zero else x).requires_grad_()
    eager, ours = (gradients(call, x) for call in (program, aotdist.compile(program, backend="fx")))
    for a, b in zip(eager, ours, strict=True):
        torch.testing.assert_close(a, b)


def test_transforms_have_their_own_formulas() -> None:
    def of_row(row: torch.Tensor) -> torch.Tensor:
        return row.prod()

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(of_row))(x)

    x = torch.randn(5, 7)
    assert torch.equal(aotdist.compile(program, backend="fx")(x), program(x))
