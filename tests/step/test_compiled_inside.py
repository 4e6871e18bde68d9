"""Steps of which parts were compiled by `torch.compile`: their programs are of the step as it was written.

What is compared are steps without Dynamo: torchao's optimizers compile the update of each parameter by
Inductor, which rounds otherwise. What a loss is computed by is compiled here by a backend that does not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from tests.step.comparison import Net, Pair, batch, loss_of, train, trained
from tests.subclasses.float8_models import needs_torchao

LOW_BIT = ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "Adam4bit", "AdamFp8"]


class Wide(nn.Module):
    """Weights that are wide enough for states of few bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64, dtype=dtype), nn.Linear(64, 64, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def wide_batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(step)).to(dtype)


def low_bit(name: str, params: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    from torchao import optim

    return getattr(optim, name)(params, lr=0.01, **options)


@needs_torchao
@pytest.mark.parametrize("name", LOW_BIT)
def test_states_of_few_bits(name: str) -> None:
    """bfloat16 weights are rounded at random."""
    dtype = torch.float32 if "W" in name else torch.bfloat16
    options = {"bf16_stochastic_round": dtype is torch.bfloat16}
    pair = Pair.of(lambda params: low_bit(name, params, **options), lambda: Wide(dtype))
    step = train(pair, num_steps=4, data=lambda at: wide_batch(at, dtype))
    state = pair.optimizers[1].state[pair.models[1].up.weight]
    assert type(state["exp_avg"]) is not torch.Tensor and len(step.graphs) == 1


@needs_torchao
def test_states_of_few_bits_by_inductor() -> None:
    losses: list[list[float]] = []
    for backend in ("fx", "inductor"):
        torch.manual_seed(0)
        model = nn.Linear(64, 64, bias=False)
        step = aotdist.train_step(model, loss_of, low_bit("AdamW8bit", trained(model)), backend=backend)
        losses.append([float(step(wide_batch(0, torch.float32))) for _ in range(5)])
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-3, atol=0)


class Compiled(torch.optim.Optimizer):
    """Compiles the update of a parameter, as it is told."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.update = torch.compile(self._update, **options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    if not self.state[param]:
                        self.state[param]["mean"] = torch.zeros_like(param)
                    self.update(param, param.grad, self.state[param]["mean"], group["lr"])

    def _update(self, param: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, lr: float) -> None:
        mean.lerp_(grad, 0.1)
        param.add_(mean, alpha=-lr)


def compiled_step(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params, lr=0.01)
    optimizer.step = torch.compile(optimizer.step, fullgraph=True)
    return optimizer


OPTIMIZERS = {
    "the step": compiled_step,
    "each update": lambda params: Compiled(params, fullgraph=True, dynamic=False),
    "each update by our backend": lambda params: Compiled(params, backend="aotdist"),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizers(make: Any) -> None:
    assert len(train(Pair.of(make), clip=1.0).graphs) == 1


FULL = {"backend": "eager", "fullgraph": True}


def in_place() -> nn.Module:
    model = Net()
    model.compile(**FULL)
    return model


def in_parts() -> nn.Module:
    model = Net()
    model.up = torch.compile(model.up, **FULL)
    model.down.compile(**FULL)
    return model


@pytest.mark.filterwarnings("ignore:Using .torch.compile.module:UserWarning")
@pytest.mark.parametrize("make", [in_place, in_parts])
def test_models(make: Any) -> None:
    pair = Pair.of(lambda params: torch.optim.SGD(params, 0.1), make)
    assert len(train(pair, loss_fn=torch.compile(loss_of, **FULL)).graphs) == 1


def test_the_first_update_compiles_nothing_either() -> None:
    def refuse(graph: Any, examples: Any) -> Any:
        raise AssertionError("Dynamo compiles")

    model = Net()
    optimizer = Compiled(trained(model), backend=refuse, fullgraph=True)
    step = aotdist.train_step(model, loss_of, optimizer, backend="fx")
    assert all(step(batch(at)).isfinite() for at in range(2))


def test_functions_that_operators_take_are_compiled_for_autograd() -> None:
    """What branches close over has a gradient at the first call, which runs as written, too."""
    layer, scale, x = nn.Linear(4, 4), nn.Parameter(torch.randn(4)), torch.randn(3, 4)

    def step() -> tuple[torch.Tensor, ...]:
        y = torch.cond(x.sum() > 0, lambda x: layer(x) * scale, lambda x: layer(x) + scale, (x,))
        layer.zero_grad()
        scale.grad = None
        y.square().sum().backward()
        return layer.weight.grad.clone(), scale.grad.clone()  # type: ignore[union-attr]

    expected, compiled = step(), aotdist.compile(step, backend="fx")
    for _ in range(2):
        for grad, of_eager in zip(compiled(), expected, strict=True):
            torch.testing.assert_close(grad, of_eager)
    assert len(compiled.graphs) == 1
