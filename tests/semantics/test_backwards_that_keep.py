"""Hooks and backwards that add gradients up: in Python, in place, by a backward of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.makers import leaf

KEPT: dict[str, torch.Tensor] = {"sum": torch.zeros(()), "added": torch.zeros(())}


def adds_up(grad: torch.Tensor) -> None:
    KEPT["sum"] = KEPT["sum"] + grad.norm()


def adds_in_place(grad: torch.Tensor) -> None:
    KEPT["added"].add_(grad.norm())


def hooked(hook: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.register_hook(hook)
        return y.exp()

    return program


def test_a_tensor_that_is_computed_with_and_replaced_is_refused_and_nothing_is_left() -> None:
    """It would be read when the forward begins: a backward of another call may come between."""
    with pytest.raises(UnsupportedProgram, match=r"computes with `KEPT\.sum` and assigns it"):
        aotdist.compile(hooked(adds_up), backend="fx")(leaf(3))
    assert KEPT["sum"].equal(torch.zeros(()))


def test_what_is_added_in_place_is_added_when_the_backward_runs() -> None:
    found = []
    for program in (hooked(adds_in_place), aotdist.compile(hooked(adds_in_place), backend="fx")):
        KEPT["added"].zero_()
        ones = torch.ones(3, requires_grad=True)
        for out in [program(ones), program(ones * 2)]:
            out.sum().backward()
        found.append(KEPT["added"].clone())
    assert torch.equal(*found)


# --- gradients that are accumulated --------------------------------------------------------------


class Reversed(torch.autograd.Function):
    """It computes its forward again in the backward, and calls that one's backward itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x).detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grads[0])
        return x.grad, None


@pytest.mark.parametrize("where", ["a function's backward", "a hook"])
def test_backward_inside_of_the_backward_is_refused_as_in_the_forward(where: str) -> None:
    layer = nn.Linear(2, 2)

    def accumulate(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            layer(grad.detach()).sum().backward()

    def program(x: torch.Tensor) -> torch.Tensor:
        if where == "a hook":
            return hooked(accumulate)(x)
        return Reversed.apply(x, layer)

    class Program(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return program(x)

    with pytest.raises(UnsupportedProgram, match=r"weight` gets its `\.grad` inside"):
        aotdist.compile(Program(), backend="fx")(leaf(1, 2))
    assert layer.weight.grad is None
