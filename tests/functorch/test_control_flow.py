"""Branches in graphs that run as modules, by PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import aotdist


def chosen(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 9, lambda x: (x.sin(), x + 1), lambda x: (x.cos(), x - 1), (x,))


class Calls(torch.nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> Any:
        return self.fn(x)


def as_it_is(gm: GraphModule, examples: Any) -> GraphModule:
    return gm


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "aot_function": lambda fn: aotdist.aot_function(fn, as_it_is),
    "compile": lambda fn: aotdist.compile(fn, backend=as_it_is),
    "export": lambda fn: aotdist.aot_export_module(Calls(fn), (torch.ones(2),), trace_joint=False)[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_graphs_with_control_flow_run_by_themselves(way: str) -> None:
    run = WAYS[way](chosen)
    for size in (1.0, 20.0):
        x = torch.full((2,), size)
        assert all(map(torch.equal, run(x), chosen(x)))
