"""Modules to export, each with a call and the position of its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x):
        return (self.linear(x).tanh().sum(),)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        y = self.norm(self.linear(x))
        return y.square().sum(), y.detach()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return (self.second(self.first(x)).sin().sum(),)


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(2), requires_grad=False)
        self.weight = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x):
        return ((x * self.weight + self.frozen).square().mean(),)


class WritesInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        x.add_(1)
        return (x * self.weight).sum(), x * 2


class WritesBufferBeforeAndAfter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("before", torch.zeros(3))
        self.register_buffer("read", torch.ones(3))
        self.register_buffer("after", torch.zeros(3))

    def forward(self, x):
        self.before.add_(x.detach())
        loss = (x * self.weight * self.before * self.read).sum()
        self.after.copy_(x)
        return (loss,)


class Views(nn.Module):
    """Every kind of result."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def forward(self, x):
        y = x.sin()
        loss = (x * self.weight).sum()
        return x.t(), loss, y.view(-1), y, x, loss.detach(), y.unbind(0)[1]


class LossIsAView(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def forward(self, x):
        loss = (x * self.weight).sum(dim=(0, 1), keepdim=True)
        return loss.detach().view(-1), loss.view(()), loss.detach()


class ViewsOfWritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))

    def forward(self, x):
        view = x.view(-1)
        x.mul_(2)
        return (x * self.weight).sum(), x.t(), view, x


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, inputs, count, *, scale, offset=None):
        y = inputs["a"] * self.weight + inputs["b"][0] * scale
        return y.sum() * count, offset, count


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3)))
        self.norm = nn.LayerNorm(4)

    def forward(self, x, target):
        return (nn.functional.mse_loss(self.norm(self.blocks(x)), target),)


class SameGradientTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x):
        return ((self.a + self.b + x).sum(),)


class OnlyBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x):
        return ((x * self.scale).sum(),)


class NoState(nn.Module):
    def forward(self, x, y):
        with torch.no_grad():
            z = x * 2
        return (x * y).sum(), z


@dataclass(frozen=True)
class Case:
    """A module and a call of it.

    Args:
        make: makes the module.
        args: makes the arguments.
        loss: position of the loss; None where another result requires grad too.
        kwargs: keyword arguments.
        theirs: whether PyTorch's exports the joint graph.
    """

    make: Callable[[], nn.Module]
    args: Callable[[], tuple[Any, ...]]
    loss: int | None = 0
    kwargs: dict[str, Any] = field(default_factory=dict)
    theirs: bool = True


def _nested() -> tuple[Any, ...]:
    return {"a": torch.randn(3), "b": [torch.randn(3)]}, 2


CASES = {
    "linear": Case(Linear, lambda: (torch.randn(2, 3),)),
    "batch norm": Case(Normed, lambda: (torch.randn(5, 3),)),
    "batch norm in evaluation": Case(lambda: Normed().eval(), lambda: (torch.randn(5, 3),)),
    "tied weights": Case(Tied, lambda: (torch.randn(2, 3),)),
    "frozen and unused": Case(Frozen, lambda: (torch.randn(3),)),
    "an input is written": Case(WritesInput, lambda: (torch.randn(3),), loss=None),
    "buffers are written": Case(WritesBufferBeforeAndAfter, lambda: (torch.randn(3),)),
    "views": Case(Views, lambda: (torch.randn(2, 3),), loss=1),
    "the loss is a view": Case(LossIsAView, lambda: (torch.randn(2, 3),), loss=1, theirs=False),
    "views of what is written": Case(ViewsOfWritten, lambda: (torch.randn(2, 3),), loss=None),
    "nested arguments": Case(Nested, _nested, kwargs={"scale": 3.0, "offset": None}, theirs=False),
    "deep": Case(Deep, lambda: (torch.randn(2, 4), torch.randn(2, 4))),
    "an input that requires grad": Case(Linear, lambda: (torch.randn(2, 3, requires_grad=True),)),
    "only buffers": Case(OnlyBuffers, lambda: (torch.randn(3, requires_grad=True),)),
    "no state": Case(NoState, lambda: (torch.randn(3, requires_grad=True), torch.randn(3))),
}
