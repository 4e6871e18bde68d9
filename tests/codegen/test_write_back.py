"""New values of inputs are stored where the inputs lie, if a compiler is told of the copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from aotdist.codegen.in_place import write_back
from aotdist.codegen.inductor import InductorBackend
from aotdist.program import Graph, Slot
from tests.codegen.captured import captured, emission


def writing(fn: Callable[..., Any], inputs: Sequence[torch.Tensor], written: Sequence[int]) -> Graph:
    """A graph whose last results are the new values of some of its arguments."""
    graph = captured(fn, inputs)
    results = graph.outs[: len(graph.outs) - len(written)]
    return Graph(graph.gm, graph.ins, (*results, *(Slot("write", f"args[{at}]") for at in written)))


def test_values_are_copied_at_the_end_and_arguments_returned() -> None:
    x, y = torch.randn(3, 4), torch.randn(4, 3)
    graph = writing(lambda x, y: [x.sum(), x + 1, y * 2], [x, y], [0, 1])
    gm = graph.copied().gm
    write_back(gm, graph)
    expected = [x.sum(), x + 1, y * 2]
    total, *stored = gm(x, y)
    assert stored[0] is x and stored[1] is y
    assert all(map(torch.equal, [total, x, y], expected))
    assert "copy_" not in str(graph.gm.code)


@pytest.mark.parametrize(
    "x",
    [torch.zeros(3, 1).expand(3, 4), torch.zeros(6, 4)[::2], torch.zeros(3, dtype=torch.complex64)],
    ids=["an element twice", "gaps", "complex numbers"],
)
def test_what_no_kernel_stores_is_left_alone(x: torch.Tensor) -> None:
    graph = writing(lambda x: [x + 1], [x], [0])
    gm = graph.copied().gm
    write_back(gm, graph)
    assert "copy_" not in str(gm.code)


@pytest.mark.slow
def test_inductor_stores_in_place_behind_who_reads() -> None:
    x, y = torch.randn(64), torch.randn(64)
    graph = writing(lambda x, y: [x.cumsum(0), y, x.flip(0) * y], [x, y], [0, 1])
    expected = [x.cumsum(0), y.clone(), x.flip(0) * y]
    emitted = InductorBackend().emit(graph, emission(graph))
    emitted.finish()
    results = emitted.call([x, y])
    assert results[1] is x and results[2] is y
    torch.testing.assert_close([results[0], x, y], expected)
