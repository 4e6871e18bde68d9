"""Operators that are there for what they do: as often, and in the order, as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import aotdist
import aotdist.functorch as ours

_print: Any = torch.ops.aten._print


class PrintsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        _print("backward")
        return grads[0]


def prints(x: torch.Tensor) -> Any:
    _print("first")
    y = x.sin()
    _print("second")
    return PrintsInBackward.apply(y) + x


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "fx": lambda fn: aotdist.compile(fn, backend="fx"),
    "inductor": lambda fn: aotdist.compile(fn, backend="inductor"),
    "aot_function": lambda fn: ours.aot_function(fn, ours.nop),
    "min-cut": lambda fn: ours.aot_function(
        fn, ours.nop, partition_fn=ours.min_cut_rematerialization_partition
    ),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_prints_are_repeated_in_order(
    way: str, requires_grad: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    run = WAYS[way](prints)
    for _ in range(2):
        x = torch.ones(2, requires_grad=requires_grad)
        out = run(x)
        if requires_grad:
            out.sum().backward()
        expected = ["first", "second", *(["backward"] if requires_grad else [])]
        assert capfd.readouterr().out.split() == expected
        assert torch.equal(out.detach(), x.detach().sin() + x.detach())
