"""Hooks and backwards that keep a gradient, or accumulate some: what they got is a tensor of the trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.api import compiled_call
from aotdist.errors import UnsupportedProgram
from tests.semantics.makers import leaf


class Saving(nn.Module):
    """Its hook keeps the gradient of a hidden result, if it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.saves = True
        self.count = 0

    def save(self, grad: torch.Tensor) -> None:
        self.count = self.count + 1
        if self.saves:
            self.grad = grad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        hidden.register_hook(self.save)
        return hidden.relu()


@pytest.mark.parametrize("times", [1, 2])
def test_a_gradient_kept_by_a_method_is_refused_and_nothing_is_left(times: int) -> None:
    model = aotdist.compile(Saving(), backend="fx")
    for _ in range(times):
        with pytest.raises(UnsupportedProgram, match="`grad` is assigned it"):
            model(torch.ones(1, 2))
        assert not hasattr(model, "grad")
    model.saves = False
    model(torch.ones(1, 2)).sum().backward()
    assert model.layer.weight.grad is not None
    assert len(compiled_call(model).artifacts) == 1


KEPT: dict[str, Any] = {"sum": torch.zeros(())}
GRADS: list[torch.Tensor] = []
LATEST: torch.Tensor | None = None


class Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        Keeping.last = grads[0]  # type: ignore[attr-defined]
        return grads[0] * 2


def adds_up(grad: torch.Tensor) -> None:
    KEPT["sum"] = KEPT["sum"] + grad.norm()


def replaces(grad: torch.Tensor) -> None:
    global LATEST  # noqa: PLW0603
    LATEST = grad


def hooked(hook: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.register_hook(hook)
        return y.exp()

    return program


KEEPERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "appended": (hooked(GRADS.append), r"hook\[0:\]"),
    "added up": (hooked(adds_up), "KEPT.sum"),
    "a global": (hooked(replaces), "LATEST"),
    "a class": (lambda x: Keeping.apply(x), "Keeping.last"),
}


@pytest.mark.parametrize("name", KEEPERS)
def test_gradients_that_are_kept_elsewhere_are_refused(name: str) -> None:
    program, place = KEEPERS[name]
    with pytest.raises(UnsupportedProgram, match=f"keeps a tensor that it computes: `{place}`"):
        aotdist.compile(program, backend="fx")(leaf(3))
    assert KEPT["sum"].equal(torch.zeros(()))
    assert not GRADS
    assert LATEST is None
    assert not hasattr(Keeping, "last")


def test_a_gradient_kept_by_a_hook_of_a_module_is_refused() -> None:
    model, kept = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), {}
    model[0].register_full_backward_hook(lambda module, grads, outputs: kept.update(grad=outputs[0]))
    with pytest.raises(UnsupportedProgram, match=r"`kept\.grad` is assigned it"):
        aotdist.compile(model, backend="fx")(leaf(1, 2))
    assert not kept


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

    with pytest.raises(UnsupportedProgram, match=r"`layer.weight` gets its `\.grad` inside"):
        aotdist.compile(program, backend="fx")(leaf(1, 2))
    assert layer.weight.grad is None
