"""Tensors that a program makes and reshapes in place, after it has viewed them: graphs say it in views."""

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


def between_views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 3
    before = y.unsqueeze(0)
    y.t_()
    return before, y, y.unsqueeze(0)


def written_since(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 3
    flat = y.view(-1)
    y.t_()
    y.add_(1)
    return flat, y


def not_returned(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 3
    row = y[0]
    y.t_()
    return row, y[1]


def a_view(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = (x * 3).view(-1)
    rest = y[1:]
    y.unsqueeze_(1)
    return rest, y, y


def detached_and_transposed(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 3
    row = y[0].detach()
    y.detach_()
    y.t_()
    return row, y


RESHAPED = [between_views, written_since, not_returned, a_view, detached_and_transposed]


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


@pytest.mark.parametrize("program", [between_views, written_since, a_view])
def test_values_with_symbolic_sizes_are_eagers(program: Callable[..., Any]) -> None:
    graph, _ = aot_export_module(
        Calling(program), (torch.randn(2, 4),), trace_joint=False, dynamic_shapes=True
    )
    x = torch.randn(5, 3)
    for found, expected in zip(graph(x), program(x), strict=True):
        assert torch.equal(found, expected)


def test_a_gradient_of_what_was_reshaped_is_refused() -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 3
        row = y[0].detach()
        y.t_()
        return row, y

    with pytest.raises(UnsupportedProgram, match=r"`out\[1\]` is reshaped in place"):
        aot_export_joint_simple(program, (torch.randn(2, 4, requires_grad=True),), trace_joint=True)


def resized(y: torch.Tensor, other: torch.Tensor) -> None:
    y.resize_(2, 2)


def given_a_storage(y: torch.Tensor, other: torch.Tensor) -> None:
    y.set_(other)  # pyright: ignore[reportArgumentType]  # the stub wants a storage


def given_data(y: torch.Tensor, other: torch.Tensor) -> None:
    y.data = other


@pytest.mark.parametrize("change", [resized, given_a_storage, given_data])
def test_what_no_view_says_is_refused(change: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, other = x * 3, x[0] * 2
        row = y[0]
        change(y, other)
        return row, y, other

    with pytest.raises(UnsupportedProgram, match="a tensor that the program makes"):
        aot_export_module(Calling(program), (torch.randn(2, 4),), trace_joint=False)
