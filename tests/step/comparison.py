"""The same training twice, as a plain loop and by `aotdist.train_step`: everything is compared to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import aotdist
from aotdist.subclasses.protocol import is_wrapper, plain_tensors

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class Net(nn.Module):
    """Dropout, a tied weight, a buffer that is written, a frozen parameter and one without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.25)
        self.down = nn.Linear(8, 6)
        self.tied = nn.Linear(6, 8, bias=False)
        self.tied.weight = self.up.weight
        self.frozen = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(self.dropout(self.norm(self.up(x)).relu())) * self.frozen
        return self.tied(x)


class Plain(nn.Module):
    """No dropout and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


@dataclass
class Pair:
    """Two models and optimizers that begin alike: one is trained as written, one by a compiled step."""

    models: tuple[nn.Module, nn.Module]
    optimizers: tuple[torch.optim.Optimizer, torch.optim.Optimizer]

    @classmethod
    def of(cls, make_optimizer: MakeOptimizer, make_model: Callable[[], nn.Module] = Net) -> Pair:
        torch.manual_seed(0)
        first = make_model()
        torch.manual_seed(0)
        models = first, make_model()
        first_optimizer, second = (make_optimizer(trained(model)) for model in models)
        return cls(models, (first_optimizer, second))

    def assert_same(self, step: int) -> None:
        states = [list(held(*both)) for both in zip(self.models, self.optimizers, strict=True)]
        assert len(states[0]) == len(states[1]), step
        for (name, a), (_, b) in zip(*states, strict=True):
            assert same(a, b), (step, name, a, b)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Parameters, buffers, gradients and everything in the optimizer's state, by name."""
    yield from model.state_dict().items()
    yield from ((f"{name}.grad", param.grad) for name, param in model.named_parameters())
    for at, entry in optimizer.state_dict()["state"].items():
        yield from ((f"{at}.{key}", value) for key, value in entry.items())


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal to the bit: NaNs equal themselves."""
    if isinstance(a, DTensor):
        return a.placements == b.placements and same(a.to_local(), b.to_local())
    if isinstance(a, torch.Tensor) and is_wrapper(a):
        return type(a) is type(b) and all(map(same, plain_tensors(a), plain_tensors(b)))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b) | bool(torch.isnan(a).all() and torch.isnan(b).all())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def train(
    pair: Pair,
    *,
    num_steps: int = 5,
    between: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: None,
    clip: float | None = None,
    accumulate: int = 1,
    loss_fn: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
    data: Callable[[int], torch.Tensor] = batch,
) -> aotdist.TrainStep:
    """Train both, and compare after each step.

    Args:
        pair: what is trained.
        num_steps: how often.
        between: is called for each optimizer after each of its steps.
        clip: the largest norm of the gradients.
        accumulate: how many steps make an update.
        loss_fn: what is minimised.
        data: the batch of a step.
    """
    eager, compiled = pair.models
    optimizer = pair.optimizers[1]
    step = aotdist.train_step(compiled, loss_fn, optimizer, clip=clip, accumulate=accumulate, backend="fx")
    for at in range(num_steps):
        torch.manual_seed(at)
        with torch.compiler.set_stance("force_eager"):  # so does what is compiled inside of a step
            expected = loss_fn(eager, data(at))
            (expected / accumulate if accumulate > 1 else expected).backward()
            if at % accumulate == accumulate - 1:
                if clip is not None:
                    nn.utils.clip_grad_norm_(trained(eager), clip)
                pair.optimizers[0].step()
                pair.optimizers[0].zero_grad()
        random_state = torch.get_rng_state()
        torch.manual_seed(at)
        loss = step(data(at))
        assert not loss.requires_grad
        assert same(loss, expected.detach()), (at, loss, expected)
        assert torch.equal(torch.get_rng_state(), random_state), at
        for optimizer in pair.optimizers:
            between(optimizer)
        pair.assert_same(at)
    return step
