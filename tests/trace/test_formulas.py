"""Gradients by the formula that eager chooses, which depends on data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import aotdist

Program = Callable[..., torch.Tensor]
OfOne = Callable[[torch.Tensor], torch.Tensor]


def in_a_checkpoint(x: torch.Tensor) -> Any:
    def product(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).prod(-1)

    return checkpoint(product, x, use_reentrant=False)


ROWS: dict[str, OfOne] = {
    "prod": lambda x: x.prod(),
    "prod of rows": lambda x: x.prod(1) * x.sum(1),
    "prod of columns kept": lambda x: torch.prod(x.t(), dim=-1, keepdim=True).cos(),
    "prod of float64": lambda x: x.prod(1, dtype=torch.float64),
    "prod in a checkpoint": in_a_checkpoint,
}
NUMBERS: dict[str, OfOne] = {
    "no zero": lambda x: x,
    "a zero": lambda x: x.index_fill(1, torch.tensor([2]), 0.0) if x.dim() > 1 else x,
    "zeros": lambda x: x.masked_fill(x < 0.5, 0.0),
}


def gradients(program: Program, *inputs: torch.Tensor, scale: float = 1.0) -> list[torch.Tensor]:
    """What a program gives, and the gradients of those of its inputs that have some."""
    leaves = [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]
    out = program(*leaves)
    weights = torch.linspace(-scale, scale, out.numel(), dtype=out.dtype).view(out.shape)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(out, wanted, weights, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def assert_eagers(program: Program, *inputs: torch.Tensor, scale: float = 1.0, **settings: Any) -> None:
    eager = gradients(program, *inputs, scale=scale)
    ours = gradients(aotdist.compile(program, backend="fx", settings=settings), *inputs, scale=scale)
    for a, b in zip(eager, ours, strict=True):
        assert (
            a.stride() == b.stride() and a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
        )


@pytest.mark.parametrize("program", ROWS)
def test_of_products(program: str) -> None:
    compiled = aotdist.compile(ROWS[program], backend="fx")
    for seed in range(4):
        torch.manual_seed(seed)
        for numbers, change in NUMBERS.items():
            x = change(torch.randn(5, 7)).requires_grad_()
            eager, ours = (gradients(f, x) for f in (ROWS[program], compiled))
            for a, b in zip(eager, ours, strict=True):
                assert a.numpy().tobytes() == b.numpy().tobytes(), (seed, numbers)


@pytest.mark.parametrize("dynamic", [False, True])
def test_of_products_with_other_layouts_and_sizes(dynamic: bool) -> None:
    for x in (torch.randn(3, 4, 5).permute(2, 0, 1), torch.randn(4, 6)[:, ::2], torch.randn(3, 1)):
        assert_eagers(ROWS["prod of rows"], x.requires_grad_(), dynamic=dynamic)
        assert_eagers(ROWS["prod"], x.requires_grad_(), dynamic=dynamic)


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


@pytest.mark.parametrize(
    "program", [torch.prod, lambda x: x.prod(1).sum(), lambda x: x.prod(0, keepdim=True).sum()]
)
@pytest.mark.parametrize("numbers", ["no zero", "a zero"])
def test_gradients_of_gradients_round_otherwise(program: OfOne, numbers: str) -> None:
    def penalty(function: Program) -> Program:
        def penalised(x: torch.Tensor) -> torch.Tensor:
            (grad,) = torch.autograd.grad(function(x), x, create_graph=True)
            return grad.square().sum()

        return penalised

    torch.manual_seed(0)
    x = NUMBERS[numbers](torch.randn(5, 7)).requires_grad_()
    eager = gradients(penalty(program), x)
    for ours in (
        penalty(aotdist.compile(program, backend="fx")),
        aotdist.compile(penalty(program), backend="fx"),
    ):
        for a, b in zip(eager, gradients(ours, x), strict=True):
            torch.testing.assert_close(a, b)


def test_transforms_have_their_own_formulas() -> None:
    def of_row(row: torch.Tensor) -> torch.Tensor:
        return row.prod()

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(of_row))(x)

    x = torch.randn(5, 7)
    assert torch.equal(aotdist.compile(program, backend="fx")(x), program(x))
    if torch.__version__ >= "2.12":  # before, its second gradient rounds otherwise in a trace
        assert_eagers(program, x.requires_grad_())


def test_other_backends_fuse_what_is_not_corrected() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.prod(1).sum()

    x = torch.randn(5, 7, requires_grad=True)
    compiled = aotdist.compile(program, backend="inductor")
    eager = gradients(program, x)
    for a, b in zip(eager, gradients(compiled, x), strict=True):
        torch.testing.assert_close(a, b)
    assert "prod_backward" not in compiled.graphs[0]["backward"].code
