"""A small model with linear layers of every kind that a recipe meets, and what compares two of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import aotdist
from tests.subclasses.fsdp_models import same_bits

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="needs torchao: pip install 'aotdist[fp8]'"
)
OWN = ["delayed", "blockwise"]
RECIPES = [
    *OWN,
    *(pytest.param(name, marks=needs_torchao) for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")),
]


class Net(nn.Module):
    """A bias, none, a frozen weight, one weight in two layers, and an output too narrow to convert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 144)
        self.down = nn.Linear(144, 32, bias=False)
        self.frozen = nn.Linear(32, 32, bias=False).requires_grad_(False)
        self.mix = nn.Linear(32, 32)
        self.mix_again = nn.Linear(32, 32)
        self.mix_again.weight = self.mix.weight
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(nn.functional.gelu(self.up(x)))
        x = self.frozen(x) + self.mix_again(self.mix(x).tanh())
        return self.head(x)


CONVERTED = ("up", "down", "frozen", "mix", "mix_again")


def make(recipe: str, dtype: torch.dtype = torch.float32) -> Net:
    """The same converted model at every call."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    aotdist.to_float8(model, recipe)
    return model


def pair(recipe: str, dtype: torch.dtype = torch.float32) -> tuple[Net, Net]:
    """One to run eagerly, one compiled."""
    return make(recipe, dtype), aotdist.compile(make(recipe, dtype), backend="fx")


def batch(step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """21 tokens, which 16 does not divide; larger ones at every step."""
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(3, 7, 32, generator=generator) * (1 + step)).to(dtype).requires_grad_()


def states(model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Parameters, gradients and buffers by name."""
    for name, param in model.named_parameters():
        yield name, param
        yield f"{name}.grad", param.grad
    yield from model.named_buffers()


def different(a: nn.Module, b: nn.Module) -> list[str]:
    """Names of what is not the same bits in both."""
    pairs = zip(states(a), states(b), strict=True)
    return [
        name
        for (name, x), (other, y) in pairs
        if name != other or (x is None) != (y is None) or (x is not None and not same_bits(x, y))
    ]
