"""Gradients that inputs have when the call begins: `p.grad`, as optimizers of one's own read and write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.meshes import sharded

Wrap = Callable[[torch.Tensor], torch.Tensor]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def two(tensor: torch.Tensor) -> torch.Tensor:
    return TwoTensor(tensor, tensor.clone())


def parameters(wrap: Wrap) -> list[nn.Parameter]:
    return [nn.Parameter(wrap(torch.linspace(-1, 1, k))) for k in (3, 4)]


def backward(params: list[nn.Parameter], call: int) -> None:
    """New gradients, and none for the first parameter at the third call."""
    for position, param in enumerate(params):
        param.grad = None
        if (position, call) != (0, 2):
            (param * param * (call + 1)).sum().backward()


def descends(params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            if param.grad is not None:
                param.sub_(param.grad * 0.1)


def scales(params: list[nn.Parameter]) -> Any:
    grads = [param.grad for param in params if param.grad is not None]
    for grad in grads:
        grad.mul_(0.5)
    return [grad.sum() for grad in grads]


def returns(params: list[nn.Parameter]) -> Any:
    return [param.grad for param in params]


def clips(params: list[nn.Parameter]) -> Any:
    return nn.utils.clip_grad_norm_(params, 0.5)


def seen(params: list[nn.Parameter], found: Any) -> str:
    return repr((found, [(param.detach(), param.grad) for param in params]))


def compare(program: Callable[..., Any], wrap: Wrap) -> Callable[..., Any]:
    compiled = aotdist.compile(program, backend="fx")
    eager, ours = parameters(wrap), parameters(wrap)
    for call in range(5):
        backward(eager, call)
        backward(ours, call)
        assert seen(ours, compiled(ours)) == seen(eager, program(eager))
    return compiled


@pytest.mark.parametrize("wrap", [plain, two])
@pytest.mark.parametrize("program", [descends, scales, returns])
def test_of_arguments(program: Callable[..., Any], wrap: Wrap) -> None:
    assert len(compare(program, wrap).graphs) == 2  # with all, and without one


@pytest.mark.parametrize("program", [descends, scales, returns])
def test_of_dtensors(program: Callable[..., Any], mesh: DeviceMesh) -> None:
    compare(program, lambda tensor: sharded(mesh, tensor))


def test_clipping() -> None:
    compare(clips, plain)


def test_the_gradient_itself_is_returned() -> None:
    params = parameters(plain)
    backward(params, 0)
    found = aotdist.compile(returns, backend="fx")(params)
    assert all(grad is param.grad for grad, param in zip(found, params, strict=True))


def test_of_a_module_in_training() -> None:
    """The gradients are those of the call before; the backward of this one adds to them."""

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x * self.weight).sin()
            return y if self.weight.grad is None else y * self.weight.grad.norm()

    eager, ours = Module(), aotdist.compile(Module(), backend="fx")
    for call in range(3):
        for module in (eager, ours):
            module(torch.full((3,), 0.5 + call)).sum().backward()
        assert torch.equal(ours.weight.grad, eager.weight.grad)


class Averaging(torch.optim.Optimizer):
    """It has a state for each parameter, which it finds by it."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["mean"], state["count"] = torch.zeros_like(param), 0
            state["count"] += 1
            state["mean"].lerp_(param.grad, 1 / 4)
            state["last"] = param.grad * 2
            param.sub_(state["mean"] / state["count"])

    def told(self) -> list[str]:
        return [repr(state) for state in self.state.values()]


def test_an_optimizer_of_ones_own() -> None:
    params, expected = parameters(plain), parameters(plain)
    eager, ours = Averaging(expected), Averaging(params)
    step = aotdist.compile(ours.step, backend="fx")
    for call in range(5):
        backward(expected, call)
        backward(params, call)
        eager.step()
        step()
        assert ours.told() == eager.told()
        assert seen(params, None) == seen(expected, None)


def reads_in_the_backward(params: list[nn.Parameter]) -> torch.Tensor:
    y = params[0].sin()
    y.register_hook(lambda grad: grad * params[0].grad.sum())
    return y.sum()


def test_what_is_refused_leaves_all_as_it_was() -> None:
    params = parameters(plain)
    backward(params, 0)
    before = seen(params, None)
    with pytest.raises(UnsupportedProgram, match="is read in the backward"):
        aotdist.compile(reads_in_the_backward, backend="fx")(params)
    assert seen(params, None) == before
