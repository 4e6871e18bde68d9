"""Gradients by the formula that eager chooses, which depends on data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.joint import corrections

ROOT = Path(__file__).parents[2]
Program = Callable[..., torch.Tensor]
OfOne = Callable[[torch.Tensor], torch.Tensor]
OfThree = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


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
    "max": lambda x: -x.abs().max(),
    "min": lambda x: torch.min(x) * 3,
    "median": lambda x: x.median() - x.nanmedian(),
    "max of rows": lambda x: x.max(1).values + torch.max(x, x * 2).sum(),
}
NUMBERS: dict[str, OfOne] = {
    "no zero": lambda x: x,
    "a zero": lambda x: x.index_fill(1, torch.tensor([2]), 0.0) if x.dim() > 1 else x,
    "zeros": lambda x: x.masked_fill(x < 0.5, 0.0),
    "ties": lambda x: x.round(),
    "infinite": lambda x: x.masked_fill(x > 1, torch.inf),
}
MASKED: dict[str, OfThree] = {
    "masked_fill": lambda x, mask, value: x.masked_fill(mask, value),
    "masked_fill_": lambda x, mask, value: (x * 2).masked_fill_(mask, value),
    "of a column": lambda x, mask, value: torch.masked_fill(x, mask[:1], value).sin(),
    "of a view": lambda x, mask, value: (y := x * 2, y[1:].masked_fill_(mask[1:], value), y)[-1],
    "value alone": lambda x, mask, value: x.detach().masked_fill(mask, value),
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
def test_of_products_and_extremes(program: str) -> None:
    compiled = aotdist.compile(ROWS[program], backend="fx")
    for seed in range(4):
        torch.manual_seed(seed)
        for numbers, change in NUMBERS.items():
            x = change(torch.randn(5, 7)).requires_grad_()
            eager, ours = (gradients(f, x) for f in (ROWS[program], compiled))
            for a, b in zip(eager, ours, strict=True):
                assert a.numpy().tobytes() == b.numpy().tobytes(), (seed, numbers)


def test_an_infinite_gradient_of_an_extreme_stays_where_it_is() -> None:
    assert_eagers(torch.max, torch.randn(4, 5, requires_grad=True), scale=torch.inf)


@pytest.mark.parametrize("dynamic", [False, True])
def test_of_products_with_other_layouts_and_sizes(dynamic: bool) -> None:
    for x in (torch.randn(3, 4, 5).permute(2, 0, 1), torch.randn(4, 6)[:, ::2], torch.randn(3, 1)):
        assert_eagers(ROWS["prod of rows"], x.requires_grad_(), dynamic=dynamic)
        assert_eagers(ROWS["prod"], x.requires_grad_(), dynamic=dynamic)


@pytest.mark.parametrize("program", MASKED)
def test_of_what_is_filled_in(program: str) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        x, value = torch.randn(40, 50, requires_grad=True), torch.randn((), requires_grad=True)
        assert_eagers(MASKED[program], x, torch.rand(40, 50) > 0.5, value)


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


PENALTIES: dict[str, OfOne] = {
    "prod": lambda x: x.prod(1).sum(),
    "prod of all": lambda x: x.prod(),
    "max": lambda x: x.max().square(),
    "masked_fill": lambda x: x.masked_fill(x > 1, x.sum()).square().sum(),
}


@pytest.mark.parametrize("penalised", PENALTIES)
@pytest.mark.parametrize("inside", [False, True])
def test_gradients_of_gradients(penalised: str, inside: bool) -> None:
    def penalty(function: Program) -> Program:
        def program(x: torch.Tensor) -> torch.Tensor:
            (grad,) = torch.autograd.grad(function(x), x, create_graph=True)
            return grad.square().sum()

        return program

    function = PENALTIES[penalised]
    for numbers in ("no zero", "a zero"):
        torch.manual_seed(0)
        x = NUMBERS[numbers](torch.randn(5, 7)).requires_grad_()
        if inside:
            assert_eagers(penalty(function), x)
        else:
            eager = gradients(penalty(function), x)
            ours = gradients(penalty(aotdist.compile(function, backend="fx")), x)
            assert all(map(torch.equal, eager, ours))


def test_third_derivatives_of_a_product() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        (first,) = torch.autograd.grad(x.prod(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return second.square().sum()

    assert_eagers(program, torch.randn(6, requires_grad=True))


def test_transforms_have_their_own_formulas() -> None:
    def of_row(row: torch.Tensor) -> torch.Tensor:
        return row.prod() + row.max()

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(of_row))(x)

    x = torch.randn(5, 7)
    assert torch.equal(aotdist.compile(program, backend="fx")(x), program(x))
    if torch.__version__ >= "2.12":  # before, its second gradient rounds otherwise in a trace
        assert_eagers(program, x.requires_grad_())


def test_other_backends_fuse_what_is_not_corrected() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return x.prod(1).sum() + x.max()

    x = torch.randn(5, 7, requires_grad=True)
    compiled = aotdist.compile(program, backend="inductor")
    eager = gradients(program, x)
    for a, b in zip(eager, gradients(compiled, x), strict=True):
        torch.testing.assert_close(a, b)
    assert "gradients_of_prod" not in compiled.graphs[0]["backward"].code


def test_each_correction_has_a_test() -> None:
    assert all((ROOT / correction.test).exists() for correction in corrections.CORRECTIONS)
    listed = [function for correction in corrections.CORRECTIONS for function in correction.instead]
    assert len(set(listed)) == len(listed)
