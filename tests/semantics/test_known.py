"""Reads of values that are the same at every call: the program may choose by them, as it does in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.semantics.observation import Scene, same_as_eager


def by_positions(x: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's masks ask whether sequences are packed."""
    positions = torch.arange(x.size(0))[None]
    starts = (torch.diff(positions, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    return x * 2 if (starts[:, -1] == 0).all() else x


def by_a_written_literal(x: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([1.0, 2.0, 3.0])
    table[0] = 5.0
    return x * table.sum().item() if table.max() > 4 else x


def by_comparing(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if torch.equal(torch.zeros(3), torch.ones(3) - 1) else x


def a_loop_of_steps(x: torch.Tensor) -> torch.Tensor:
    step = torch.zeros((), dtype=torch.int64)
    while step < 3:
        x, step = x * x, step + 1
    return x


def of_an_unpacked_result(x: torch.Tensor) -> torch.Tensor:
    largest, place = torch.linspace(0, 1, 5).max(0)
    return x * int(place) + float(largest)


def in_a_mode(x: torch.Tensor) -> torch.Tensor:
    """Autocast is in the nodes already: it must not cast again what is computed again."""
    eye = torch.eye(3) / 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x * (eye @ eye).sum().item()


PROGRAMS = [
    by_positions,
    by_a_written_literal,
    by_comparing,
    a_loop_of_steps,
    of_an_unpacked_result,
    in_a_mode,
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_no_call_changes_is_read(program: Callable[..., torch.Tensor], wrapped: bool) -> None:
    def build() -> Scene:
        x = torch.randn(4, requires_grad=True)
        return Scene(program, (TwoTensor(x, x.clone()).detach().requires_grad_() if wrapped else x,))

    same_as_eager(build, calls=2)


def test_it_leaves_nothing_in_the_graph() -> None:
    program = aotdist.compile(by_positions, backend="fx")
    program(torch.randn(4))
    (graphs,) = program.graphs
    targets = [node.target for node in graphs["inference"].graph.nodes if node.op == "call_function"]
    assert targets == [torch.ops.aten.mul.Tensor]


def by_its_sum(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if (torch.ones(4) * x).sum() > 0 else x


def by_a_draw(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.rand(()) > 0.5 else x


def by_a_branch(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x * x.sum().item(), torch.sin, (x,))


@pytest.mark.parametrize("program", [by_its_sum, by_a_draw, by_a_branch])
def test_what_a_call_changes_is_refused(program: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(UnsupportedProgram, match="read off a tensor|reads a tensor's data"):
        aotdist.compile(program, backend="fx")(torch.randn(4))


def test_what_a_symbolic_size_changes_is_refused() -> None:
    x = torch.randn(4)
    aotdist.mark_dynamic(x, 0)
    with pytest.raises(UnsupportedProgram, match="read off a tensor"):
        aotdist.compile(by_positions, backend="fx")(x)
