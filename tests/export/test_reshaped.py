"""Tensors that a program makes and reshapes in place: graphs say it in views, or the program is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aotdist.errors import UnsupportedProgram
from aotdist.export import aot_export_joint_simple, aot_export_module


class Calling(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> Any:
        return self.fn(x)


def viewed_later(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 3
    y.t_()
    return y, y.unsqueeze(0)


def written_later(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 3
    y.t_()
    y.add_(1)
    return y, y[1]


def a_view(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x * 3).view(-1)
    y.unsqueeze_(1)
    return y, y, y[1:]


RESHAPED = [viewed_later, written_later, a_view]


@pytest.mark.parametrize("program", RESHAPED)
def test_values_are_eagers(program: Callable[..., Any]) -> None:
    x = torch.randn(2, 4)
    graphs = (
        aot_export_module(Calling(program), (x,), trace_joint=False)[0],
        aot_export_joint_simple(program, (x,), trace_joint=False),
    )
    for graph in graphs:
        for found, expected in zip(graph(x), program(x), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("program", RESHAPED)
def test_values_with_symbolic_sizes_are_eagers(program: Callable[..., Any]) -> None:
    graph, _ = aot_export_module(
        Calling(program), (torch.randn(2, 4),), trace_joint=False, dynamic_shapes=True
    )
    x = torch.randn(5, 3)
    for found, expected in zip(graph(x), program(x), strict=True):
        assert torch.equal(found, expected)


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "reshaped": lambda y, _: y.t_(),
    "detached": lambda y, _: y.requires_grad and y.detach_(),
    "resized": lambda y, _: y.resize_(2, 2),
    "given a storage": lambda y, other: y.set_(other),  # pyright: ignore[reportArgumentType]
    "given data": lambda y, other: setattr(y, "data", other),
}


@pytest.mark.parametrize("change", CHANGES)
def test_views_of_what_changes_afterwards_are_refused(change: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.set_grad_enabled(change == "detached"):
            y, other = x * 3, x[0] * 2
            row = y[0].detach()
        CHANGES[change](y, other)
        return row, y.detach()

    with pytest.raises(
        UnsupportedProgram, match="a tensor that the program made, and then reshaped, detached"
    ):
        aot_export_module(Calling(program), (torch.randn(2, 4, requires_grad=True),), trace_joint=False)
