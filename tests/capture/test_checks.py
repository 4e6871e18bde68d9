"""`torch._check_tensor_all`: what eager raises is raised when the program has run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.export import aot_export_module
from tests.semantics.observation import Scene, same_as_eager

GOOD, BAD = torch.tensor([1.0, 2.0]), torch.tensor([1.0, -2.0])


def checked(x: torch.Tensor) -> torch.Tensor:
    torch._check_tensor_all(x > 0)
    return x * 2


def checked_twice(x: torch.Tensor) -> dict[str, Any]:
    torch._check_tensor_all(x < 9, lambda: "too large")
    y = x.exp()
    torch._check_tensor_all_with(ValueError, y > 1, lambda: f"{y.shape[0]} are not positive")
    return {"y": y, "constant": 3}


def checked_and_written(x: torch.Tensor) -> None:
    x.add_(1)
    torch._check_tensor_all(x > 0, lambda: "negative")


def checked_in_a_checkpoint(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(checked, x, use_reentrant=False)


def checked_by_a_loss(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gaussian_nll_loss(x, x.sin(), x * 1)


PROGRAMS = (checked, checked_twice, checked_and_written, checked_in_a_checkpoint, checked_by_a_loss)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_holds(requires_grad: bool, program: Callable[[torch.Tensor], Any]) -> None:
    same_as_eager(lambda: Scene(program, (GOOD.clone().requires_grad_(requires_grad) * 1.5,)))


def raised_by(call: Callable[[torch.Tensor], Any]) -> tuple[type[Exception], str]:
    """Without the error itself, whose frames keep a checkpoint's hooks on saved tensors at work."""
    try:
        call(BAD.clone())
    except (RuntimeError, ValueError) as error:
        return type(error), str(error)
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("backend", ["fx", "inductor"])
def test_what_does_not_hold(backend: str, program: Callable[[torch.Tensor], Any]) -> None:
    compiled = aotdist.compile(program, backend=backend)
    compiled(GOOD.clone())
    assert raised_by(compiled) == raised_by(program)
    compiled(GOOD.clone())
    assert len(compiled.artifacts) == 1


def test_a_check_of_a_constant_is_made_at_once() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(limits > 0, lambda: "limits")
        return x * 2

    limits = torch.tensor([-1.0])
    with pytest.raises(RuntimeError, match="limits"):
        aotdist.compile(program, backend="fx")(GOOD)


def test_what_is_no_condition_raises_as_ever() -> None:
    for condition in (True, torch.ones(2)):
        with pytest.raises(TypeError, match="cond"):
            aotdist.compile(lambda x, c=condition: torch._check_tensor_all(c), backend="fx")(GOOD)


def test_in_a_backward() -> None:
    class InBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            torch._check_tensor_all(grad > 0, lambda: "of the gradient")
            return grad * 2

    for call in (InBackward.apply, aotdist.compile(lambda x: InBackward.apply(x), backend="fx")):
        x = GOOD.clone().requires_grad_()
        call(x).sum().backward()
        assert x.grad is not None and torch.equal(x.grad, torch.full_like(GOOD, 2.0))
        with pytest.raises(RuntimeError, match="of the gradient"):
            (-call(x).sum()).backward()


@pytest.mark.parametrize("where", ["branch", "of another kind"])
def test_elsewhere_it_is_refused(where: str) -> None:
    class OwnError(Exception):
        pass

    def program(x: torch.Tensor) -> Any:
        if where == "branch":
            return torch.cond(x.sum() > 0, checked, torch.sin, (x,))
        return torch._check_tensor_all_with(OwnError, x > 0)

    with pytest.raises(UnsupportedProgram):
        aotdist.compile(program, backend="fx")(GOOD.clone().requires_grad_())


def test_an_exported_graph_has_none() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            return (checked(x),)

    with pytest.raises(UnsupportedProgram, match="an exported graph raises no errors"):
        aot_export_module(Module(), (GOOD,), trace_joint=False)


def test_in_an_artifact(tmp_path: Path) -> None:
    path = tmp_path / "checked.aot"
    aotdist.build(lambda: (checked, (GOOD,)), path)
    loaded = aotdist.load(path, checked)
    assert torch.equal(loaded(GOOD), checked(GOOD))
    with pytest.raises(RuntimeError, match="Expected cond to be True"):
        loaded(BAD)
