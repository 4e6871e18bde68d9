"""Backwards that no compiler and no partition saw: between results, and for gradients of other kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import functorch.compile as theirs
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import aotdist.functorch as ours
from aotdist.subclasses.protocol import plain_tensors

Partition = Callable[..., Any]

each_partition = pytest.mark.parametrize(
    "partition_fn",
    [
        ours.default_partition,
        ours.min_cut_rematerialization_partition,
        theirs.default_partition,
        theirs.min_cut_rematerialization_partition,
    ],
    ids=["default", "min-cut", "their default", "their min-cut"],
)


def plain(value: float) -> torch.Tensor:
    return torch.linspace(-1, value, 6).view(2, 3).requires_grad_()


def wrapped(value: float) -> torch.Tensor:
    return TwoTensor(plain(value).detach(), plain(2 * value).detach()).requires_grad_()


def same(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    assert found is not None and expected is not None
    parts = zip(plain_tensors(found), plain_tensors(expected), strict=True)
    return type(found) is type(expected) and all(torch.equal(a, b) for a, b in parts)


each_kind = pytest.mark.parametrize("make", [plain, wrapped], ids=["plain", "TwoTensor"])


def one_through_another(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first = (x * w).sin().cos()
    return first, (first * w).exp().sin()


def ten_times(grad: torch.Tensor) -> torch.Tensor:
    return grad * 10


def through_a_view(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first = x.mul(2)
    drawn = torch.nn.functional.dropout(w.sin(), 0.5)
    first.add_(drawn)
    return first, first[0] * drawn[0], first.view(-1)


@each_partition
@each_kind
@pytest.mark.parametrize("fn", [one_through_another, through_a_view])
def test_the_gradient_of_one_result_through_another(
    fn: Callable[..., Any], make: Callable[[float], torch.Tensor], partition_fn: Partition
) -> None:
    seen: list[list[torch.Tensor | None]] = []
    for run in (fn, ours.aot_function(fn, ours.nop, partition_fn=partition_fn)):
        x, w = make(1.0), make(0.5)
        torch.manual_seed(0)
        first, second, *_ = run(x, w)
        grads = torch.autograd.grad(second.sum(), (first, x, w), allow_unused=True, retain_graph=True)
        first.register_hook(ten_times)
        first.retain_grad()
        second.sum().backward()
        seen.append([*grads, first.grad, x.grad, w.grad])
    for expected, found in zip(*seen, strict=True):
        assert same(found, expected)


def test_the_compiler_of_backwards_is_not_asked_for_parts() -> None:
    asked = list[str]()

    def backward_compiler(gm: Any, examples: Any) -> Any:
        asked.append("backward")
        return ours.nop(gm, examples)

    compiled = ours.aot_function(one_through_another, ours.nop, backward_compiler)
    first, second = compiled(plain(1.0), plain(0.5))
    torch.autograd.grad(second.sum(), first, retain_graph=True)
    assert asked == []
    second.sum().backward()
    assert asked == ["backward"]


def sine(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def sine_of_nested(x: torch.Tensor) -> torch.Tensor:
    return (x * _nested(1.0)).sin()


def beside_nested(x: torch.Tensor) -> torch.Tensor:
    return (x * 2, x * _nested(1.0))[0]


def nested_leaf(value: float) -> torch.Tensor:
    return _nested(value).requires_grad_()


def _nested(value: float) -> torch.Tensor:
    return TwoTensor(TwoTensor(*[plain(value).detach()] * 2), TwoTensor(*[plain(2.0).detach()] * 2))


@each_partition
@pytest.mark.parametrize(
    ("make", "fn", "tangent"),
    [
        (wrapped, sine, plain),
        (nested_leaf, sine, plain),
        (plain, sine_of_nested, wrapped),
        (plain, beside_nested, wrapped),
    ],
    ids=["plain for TwoTensor", "plain for nested", "TwoTensor for nested", "TwoTensor for plain"],
)
def test_gradients_of_other_kinds(
    make: Callable[[float], torch.Tensor],
    fn: Callable[..., Any],
    tangent: Callable[[float], torch.Tensor],
    partition_fn: Partition,
) -> None:
    seen = list[torch.Tensor | None]()
    for run in (fn, ours.aot_function(fn, ours.nop, partition_fn=partition_fn)):
        x = make(0.5)
        run(x).backward(tangent(3.0).detach())
        seen.append(x.grad)
    assert same(seen[1], seen[0])


class Cube(torch.autograd.Function):
    """Its gradients are differentiated by autograd's own graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * 3 * x**2


def cubed(x: torch.Tensor) -> Any:
    return Cube.apply(x)


@each_partition
def test_gradients_of_gradients(partition_fn: Partition) -> None:
    seen = list[torch.Tensor]()
    for run in (cubed, ours.aot_function(cubed, ours.nop, partition_fn=partition_fn)):
        x = plain(1.0)
        (grad,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        seen.extend(torch.autograd.grad(grad.sin().sum(), x))
    assert torch.equal(*seen)
