"""Graphs that compute Python numbers, cut in two for compilers that only know tensors."""

from __future__ import annotations

import builtins
import copy
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

import aotdist
from aotdist.codegen.contract import Emitted
from aotdist.codegen.fx import FxBackend
from aotdist.codegen.numbers import split_off_numbers
from aotdist.errors import UnsupportedProgram
from aotdist.program import Graph
from tests.codegen.captured import captured, emission

_ATEN = torch.ops.aten
READ = _ATEN._local_scalar_dense.default
X, STEP = torch.linspace(-1, 2, 6), torch.tensor(3.0)


def with_number(call: Callable[[Any, Any, Any], Any], *, of_step: bool) -> Graph:
    """A graph of `x` and a step count: `step + 1`, and `call(graph, x, number)` of a number that it reads.

    Args:
        call: makes the last node.
        of_step: read the number off the step count, else off `x`.
    """
    graph = captured(lambda x, step: [step + 1, x.sum()], [X, STEP])
    fx = graph.gm.graph
    output = fx.output_node()
    step, total = output.args[0]
    with fx.inserting_before(output):
        read = fx.call_function(READ, (step if of_step else total,))
        number = fx.call_function(operator.pow, (2.0, read))
        number = fx.call_function(builtins.max, (0.25, number))
        number = fx.call_function(math.sqrt, (number,))
        for node in fx.nodes:
            if node.op == "call_function" and "val" not in node.meta:
                node.meta["val"] = 1.0
        result = call(fx, graph.placeholders()[0], number)
        result.meta["val"] = graph.placeholders()[0].meta["val"]
    output.args = ((step, result),)
    return graph


def add(fx: torch.fx.Graph, x: torch.fx.Node, number: torch.fx.Node) -> torch.fx.Node:
    return fx.call_function(_ATEN.add.Tensor, (x, x), {"alpha": number})


@pytest.mark.parametrize("of_step", [True, False], ids=["ahead", "within"])
def test_both_parts_together_are_the_graph(of_step: bool) -> None:
    graph = with_number(add, of_step=of_step)
    mode = emission(graph).fake_mode
    assert mode is not None
    apart = split_off_numbers(graph, mode)
    assert apart is not None
    rest, with_numbers = apart
    targets = {node.target for node in rest.gm.graph.nodes}
    assert targets.isdisjoint({READ, operator.pow, builtins.max, math.sqrt})
    assert ("numbers" in map(str, rest.ins)) == of_step
    assert rest.results()[0] is None, "the step count is computed ahead"
    whole = FxBackend().emit(graph, emission(graph)).call
    parts: Emitted = with_numbers(FxBackend().emit(rest, emission(graph)))
    torch.testing.assert_close(list(parts.call([X, STEP])), list(whole([X, STEP])))


WITH_A_THRESHOLD: dict[str, Callable[[torch.Tensor, float], Any]] = {
    "clamped on both sides": lambda x, t: x.clamp(1 - t, 1 + t),
    "clamped below": lambda x, t: x.clamp(min=t),
    "clamped above": lambda x, t: x.clamp_max(t),
    "compared": lambda x, t: torch.stack([(x > t) | (x == t), (x <= t) & (x < 2 * t), (x >= t) & (x != t)]),
    "a margin": lambda x, t: torch.relu(t - x),
    "filled": lambda x, t: x.masked_fill(x > 0, t) + torch.full_like(x, t),
    "a remainder": lambda x, t: x % t,
    "lists": lambda x, t: torch._foreach_maximum(torch._foreach_minimum([x, x + 1], t), -t),
    "lists clamped": lambda x, t: torch._foreach_clamp_min(torch._foreach_clamp_max([x, x + 1], t), -t),
}


@pytest.mark.parametrize("name", WITH_A_THRESHOLD)
def test_thresholds_that_change_are_one_program(name: str) -> None:
    program = WITH_A_THRESHOLD[name]
    compiled = aotdist.compile(program, backend=lambda gm, _: gm.forward)
    for threshold in (0.5, 0.75, 1.0, 1.25):
        torch.testing.assert_close(compiled(X, threshold), program(X, threshold))
    assert len(compiled.graphs) == 2  # that of the first call is of its number


def test_numbers_are_not_put_where_a_model_has_no_data() -> None:
    """An ensemble of `torch.func` calls one model on the meta device with the parameters of each."""
    base, params = nn.Linear(6, 6, device="meta"), dict(nn.Linear(6, 6).named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional_call(base, params, (x,)).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = aotdist.compile(step, backend=lambda gm, _: gm.forward)
    losses = [compiled(X).item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True) and len(compiled.graphs) == 1


def test_graph_without_numbers_stays_whole() -> None:
    graph = captured(lambda x, step: [x * 2, step + 1], [X, STEP])
    mode = emission(graph).fake_mode
    assert mode is not None and split_off_numbers(graph, mode) is None


def test_operator_without_a_form_for_tensors_is_refused() -> None:
    graph = with_number(lambda fx, x, n: fx.call_function(_ATEN.leaky_relu.default, (x, n)), of_step=True)
    mode = emission(graph).fake_mode
    assert mode is not None
    with pytest.raises(UnsupportedProgram, match="leaky_relu"):
        split_off_numbers(graph, mode)


class Experts(nn.Module):
    """Each of two matrices multiplies as many rows as the data say, one after the other or in one call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.experts = nn.Linear(8, 8), nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: torch.Tensor, repeats: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        first, second = counts.tolist()
        rows = self.linear(x).repeat_interleave(repeats, 0, output_size=first + second).sin()
        in_turns = [
            part @ expert for part, expert in zip(rows.split([first, second]), self.experts, strict=True)
        ]
        ends = counts.cumsum(0, dtype=torch.int32)
        return torch.cat(in_turns).sum() + F.grouped_mm(rows.cos(), self.experts, offs=ends).square().sum()


def test_inductor_compiles_the_backward_of_experts() -> None:
    eager = Experts()
    compiled = aotdist.compile(copy.deepcopy(eager), backend="inductor")
    for counts in ([3, 5], [6, 1], [2, 6]):
        arguments = torch.randn(4, 8), torch.tensor([sum(counts) - 3, 1, 0, 2]), torch.tensor(counts)
        losses = [model(*arguments) for model in (eager, compiled)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0])
        for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert len(compiled.graphs) == 1
