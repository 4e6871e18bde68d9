"""DTensors written in place, by every name that they have: arguments, buffers, views, local parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from aotdist.errors import UnsupportedProgram
from tests.ranks.harness import World
from tests.semantics.observation import Scene, same_as_eager
from tests.subclasses.dtensors import (
    PLACEMENTS,
    S0,
    SIZES,
    R,
    assert_few_are_refused,
    compare,
    compared,
    grid,
    leaf,
    non_leaf,
    numbers,
    placements_and_sizes,
    refused_by_eager,
    spread,
    without_history,
)

pytestmark = pytest.mark.ranks


def _set(x: torch.Tensor) -> None:
    x[:, 0] = 2.5


def _set_rows(x: torch.Tensor) -> None:
    x[1:] = x[1:]


def _assign_data(x: torch.Tensor) -> None:
    x.data = (x * 2).detach()


WRITES: dict[str, Callable[[Any], Any]] = {
    "multiplied": lambda x: x.mul_(2),
    "added to itself": lambda x: x.add_(x.detach() * 0.5),
    "copied": lambda x: x.copy_(x.detach() * 2),
    "copied from other placements": lambda x: x.copy_(x.detach().redistribute(placements=[R]) * 2),
    "zeroed": lambda x: x.zero_(),
    "filled": lambda x: x.fill_(0.5),
    "a column": _set,
    "columns": lambda x: x[:, 1:].mul_(3),
    "rows, by themselves": _set_rows,
    "transposed": lambda x: x.t().mul_(3),
    "reshaped": lambda x: x.unsqueeze(0).add_(1),
    "fused": lambda x: x.addcmul_(x.detach(), x.detach()),
    "between two": lambda x: x.lerp_(x.detach() * 2, 0.1),
    "masked": lambda x: x.masked_fill_(x.detach() > 0, 0.0),
    "clamped": lambda x: x.clamp_(min=0),
    "lists": lambda x: torch.no_grad()(torch._foreach_add_)([x], 1.0),
    "random": lambda x: x.uniform_(),
    "dropped out": lambda x: F.dropout(x, 0.5, inplace=True),
    "into an argument": lambda x: torch.sin(x.detach(), out=x.detach()),
    "the local part": lambda x: x._local_tensor.mul_(2),
    "what to_local gives": lambda x: x.to_local().mul_(2),
    "behind autograd's back": lambda x: x.data.mul_(2),
    "detached": lambda x: x.detach().mul_(2),
    "given other data": _assign_data,
}


def written_case(placement: str, size: str) -> set[str]:
    """The names of those that eager refuses, with history and without."""
    refused = set()
    for name, write in WRITES.items():

        def program(x: torch.Tensor, write: Callable[[Any], Any] = write) -> Any:
            before = x * 2
            write(x)
            return before + 1, x * 3

        for made in (without_history, non_leaf):
            if not compared(program, made(SIZES[size], PLACEMENTS[placement])):
                refused.add(name)
    return refused


@placements_and_sizes({("R", "even"), ("S0", "uneven"), ("S0", "empty"), ("S1", "uneven"), ("P", "even")})
def test_arguments(world2: World, placement: str, size: str) -> None:
    found = world2.run(written_case, placement, size, timeout=100)
    assert_few_are_refused(found, 11 if placement == "P" else 3)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda x: x.t(),
    "columns": lambda x: x[:, 1:],
    "a column": lambda x: x[:, 0],
    "reshaped": lambda x: x.unsqueeze(0),
    "pieces": lambda x: x.split(2, 1),
    "the local part": lambda x: x.to_local(),
    "the same": lambda x: x.view_as(x),
    "detached": lambda x: x.detach(),
    "wrapped again": lambda x: DTensor.from_local(x.to_local(), x.device_mesh, x.placements),
}


COPIES = {("S1", "columns"), ("S1", "a column"), ("S1", "pieces")}
"""Taken along what is sharded, after a redistribution."""
A_COPY = r"`out\[0\]` is a view of a DTensor that was redistributed"


def views_case(placement: str) -> None:
    """Views of arguments and of what is made inside, written before and after."""
    for name, view in VIEWS.items():

        def of_an_argument(x: torch.Tensor, view: Callable[[Any], Any] = view) -> Any:
            return view(x), x * 2

        def then_written(x: torch.Tensor, view: Callable[[Any], Any] = view) -> Any:
            y = x * 2
            seen = view(y)
            with torch.no_grad():
                y.mul_(2)
            return seen, y

        for program in (of_an_argument, then_written):
            for made in (leaf, non_leaf):
                maker = made(SIZES["even"], PLACEMENTS[placement])
                if refused_by_eager(program, maker) is None:
                    refused = program is then_written and (placement, name) in COPIES
                    with pytest.raises(UnsupportedProgram, match=A_COPY) if refused else nullcontext():
                        compare(program, maker, calls=1)


@pytest.mark.parametrize("placement", ["S0", "S1"])
def test_views(world2: World, placement: str) -> None:
    world2.run(views_case, placement, timeout=100)


def aliases_case() -> None:
    """Where nothing moves, a redistribution gives the same memory to a tensor that is no view to autograd."""
    mesh = grid()

    def program(x: torch.Tensor, write: bool) -> torch.Tensor:
        same = x.redistribute(placements=[S0])  # type: ignore[attr-defined]
        if write:
            with torch.no_grad():
                x.add_(1)
        return same

    compare(lambda x: program(x, False), leaf(SIZES["even"], S0), mesh=mesh)
    compare(lambda x: (y := x * 2, program(y, True)), leaf(SIZES["even"], S0), mesh=mesh)
    with pytest.raises(UnsupportedProgram, match="lies in the memory of"):
        compare(lambda x: program(x, True), leaf(SIZES["even"], S0), mesh=mesh)


def test_aliases_that_autograd_does_not_know(world2: World) -> None:
    world2.run(aliases_case)


class Averaging(nn.Module):
    """Keeps averages of what it saw: in a sharded buffer, in a plain one, and in one that is assigned."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)
        parallelize_module(self.linear, mesh, ColwiseParallel(use_local_output=False))
        self.register_buffer("mean", spread(mesh, (6,), S0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.last = spread(mesh, (6,), S0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        with torch.no_grad():
            seen = y.mean(0)
            self.mean.lerp_(seen, 0.1)
            self.calls += 1
            self.last = seen * 2
        return y * self.mean


def seeded(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return Averaging(mesh)


def buffers_case() -> None:
    """Under training: written at each call, and read by the backward as they were."""
    mesh = grid()
    same_as_eager(lambda: Scene(seeded(mesh), (numbers((3, 4)),)), calls=3)


def test_buffers(world2: World) -> None:
    world2.run(buffers_case)


def shared_case() -> None:
    """Two DTensors around one memory, one of them written; and a DTensor beside its own local part."""
    mesh = grid()

    def program(x: Any, y: Any) -> Any:
        x.mul_(2)
        return y * 3

    def build(local: bool) -> Scene:
        x = distribute_tensor(numbers((4, 6)), mesh, [S0])
        other = x._local_tensor if local else DTensor.from_local(x._local_tensor, mesh, [R])
        return Scene(program, (x, other))

    for local in (False, True):
        same_as_eager(lambda local=local: build(local), calls=2)


def test_memory_that_is_shared(world2: World) -> None:
    world2.run(shared_case)
