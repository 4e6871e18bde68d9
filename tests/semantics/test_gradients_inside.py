"""Programs that ask for gradients themselves, or have them kept: what is left for the caller's backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.makers import leaf
from tests.semantics.observation import Scene, assert_both_give_the_same, same_as_eager

# --- history that the program has freed ----------------------------------------------------------


def trained(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A step of gradient descent, and the loss before it."""
    loss = (x * w).square().mean()
    (grad,) = torch.autograd.grad(loss, w)
    with torch.no_grad():
        w.sub_(0.1 * grad)
    return loss


def test_the_loss_of_a_step_inside_is_returned_and_has_no_backward() -> None:
    def build() -> Scene:
        return Scene(trained, (torch.randn(3), leaf(3)))

    same_as_eager(build, calls=2, backward=False)
    errors = []
    for call in (trained, aotdist.compile(trained, backend="fx")):
        loss = call(torch.ones(3), torch.ones(3, requires_grad=True))
        with pytest.raises(RuntimeError, match="through the graph a second time") as caught:
            (loss * 2).backward()
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_other_results_keep_their_backward() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        loss = (x * w).exp().sum()
        (grad,) = torch.autograd.grad(loss, w)
        return loss, (w * grad).sin(), loss.detach() * w

    def use(call: Any) -> list[torch.Tensor]:
        x, w = leaf(3), leaf(3)
        loss, other, last = call(x, w)
        assert loss.requires_grad and not loss.is_leaf
        (other.sum() + last.sum()).backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return [loss.detach(), w.grad, x.grad]

    assert_both_give_the_same(program, use)


def test_a_history_that_saves_nothing_is_not_freed() -> None:
    def program(w: torch.Tensor) -> Any:
        total = (w + 1).sum()
        return total, torch.autograd.grad(total, w)[0]

    same_as_eager(lambda: Scene(program, (leaf(3),)), calls=2)


@pytest.mark.parametrize("name", ["a view of it", "what leads to leaves elsewhere", "a written input"])
def test_what_is_partly_freed_is_refused(name: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        if name == "a written input":
            x.mul_(w)
        loss = (x * w).exp().sum()
        torch.autograd.grad(loss, w)
        match name:
            case "a view of it":
                return loss, loss.view(1)
            case "a written input":
                return None
            case _:
                return loss + w.sum()

    with pytest.raises(UnsupportedProgram, match=r"already freed by its own(.|\n)*retain_graph=True"):
        aotdist.compile(program, backend="fx")(torch.ones(3), leaf(3))


# --- gradients that are kept ---------------------------------------------------------------------


class Watched(nn.Module):
    """It keeps a result of a layer, with its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden = self.layer(x)
        self.hidden.retain_grad()
        return self.hidden.square().sum()


@pytest.mark.parametrize("calls", [1, 2])
def test_what_is_assigned_retains_its_gradient(calls: int) -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        model = Watched()
        call = aotdist.compile(model, backend="fx") if compiles else model
        for _ in range(calls):
            call(torch.ones(1, 2)).backward()
        assert model.hidden is not None
        assert model.hidden.retains_grad
        found.append([model.hidden.grad, model.layer.weight.grad, model.layer.bias.grad])
    assert all(map(torch.equal, *found))


def test_results_and_their_views_retain_gradients() -> None:
    def program(x: torch.Tensor) -> Any:
        y = x * 2
        rows = y[1:]
        for tensor in (y, rows):
            tensor.retain_grad()
        hidden = x.exp()
        hidden.retain_grad()
        return y, rows, hidden.sin(), y

    def use(call: Any) -> list[torch.Tensor | None]:
        x = leaf(3, 2)
        outs = call(x)
        assert outs[3] is outs[0]
        (outs[0].square().sum() + outs[1].sum() + outs[2].sum()).backward()
        return [x.grad, *(out.grad for out in outs[:2])]

    assert_both_give_the_same(program, use)


def test_an_argument_is_told_inside_to_retain_its_gradient() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.retain_grad()
        return x.sin()

    def use(call: Any) -> list[torch.Tensor | None]:
        leaves = [leaf(3), leaf(3)]
        args = [leaves[0], leaves[1] * 3]
        for x in args:
            call(x).sum().backward()
        assert args[-1].retains_grad
        return [*(one.grad for one in leaves), *(x.grad for x in args)]

    assert_both_give_the_same(program, use)
