"""Equal layers of a printed graph are one function, and nothing of what runs changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aotdist.codegen.fx import FxBackend, marked_call, print_graph
from aotdist.program import Graph
from tests.codegen.captured import calls, captured, emission

Layer = Callable[[Tensor, Tensor], Tensor]
DEPTH = 10


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """Long enough to be a function."""
    normed = x
    for _ in range(8):
        normed = (normed - normed.mean(-1, keepdim=True)) * 0.5
    return x + normed @ weight


def stacked(layer: Layer) -> Callable[..., list[Tensor]]:
    def fn(x: Tensor, *weights: Tensor) -> list[Tensor]:
        hidden = [x]
        for weight in weights:
            hidden.append(layer(hidden[-1], weight))
        return [hidden[1], hidden[-1]]

    return fn


def graph_and_inputs(fn: Callable[..., list[Tensor]]) -> tuple[Graph, list[Tensor]]:
    torch.manual_seed(0)
    inputs = [torch.randn(4, 4) for _ in range(DEPTH + 1)]
    return captured(fn, inputs), inputs


def test_layers_are_one_function() -> None:
    graph, inputs = graph_and_inputs(stacked(layer))
    emitted = FxBackend().emit(graph, emission(graph))
    source = emitted.source
    assert source.count("def layer(args):") == 1
    num_calls = source.count(" = layer(args)")
    assert num_calls >= DEPTH - 2 and f"# called {num_calls} times\n" in source
    assert source.count("aten_mm(") == 1 + DEPTH - num_calls
    results, expected = emitted.call(list(inputs)), stacked(layer)(*inputs)
    assert all(one.equal(other) for one, other in zip(results, expected, strict=True))


def test_marks_and_comparisons_see_a_straight_line() -> None:
    graph, inputs = graph_and_inputs(stacked(layer))
    flat = print_graph(graph, flat=True).source
    assert "layer" not in flat and flat.count("aten_mm(") == DEPTH == print_graph(
        graph, marked=True
    ).source.count("aten_mm(")
    expected = stacked(layer)(*inputs)
    results = marked_call(graph, "test")(list(inputs))
    assert all(one.equal(other) for one, other in zip(results, expected, strict=True))


def test_an_argument_that_a_layer_used_up_is_freed_in_it() -> None:
    graph, inputs = graph_and_inputs(stacked(layer))
    *_, product = (node for node in calls(graph) if node.target is torch.ops.aten.mm.default)
    seen: list[bool] = []

    def spying(a: Tensor, weight: Tensor) -> Tensor:
        seen.append(first() is None)
        return a @ weight

    for node in calls(graph):
        if node.target is torch.ops.aten.mm.default:
            node.target = spying
    assert product.target is spying
    run = FxBackend().emit(graph, emission(graph)).call
    args = [tensor.clone() for tensor in inputs]
    first = weakref.ref(args[1])  # the first layer's weight
    run(args)
    assert args == [] and seen == [False] + [True] * (DEPTH - 1)


def test_layers_that_are_wired_in_another_way_stay_apart() -> None:
    def fn(x: Tensor, *weights: Tensor) -> list[Tensor]:
        for at, weight in enumerate(weights):
            x = layer(x, x if at == 7 else weight)
        return [x]

    graph, inputs = graph_and_inputs(fn)
    emitted = FxBackend().emit(graph, emission(graph))
    assert " = layer(args)" in emitted.source and "aten_mm(" in emitted.source.split("def forward")[1]
    assert emitted.call(list(inputs))[0].equal(fn(*inputs)[0])


@pytest.mark.parametrize("text", ["50%", "%s", "%(a)s"])
def test_a_percent_sign_stays(text: str) -> None:
    graph = captured(lambda x: [x + 1], [torch.ones(2)])
    (node,) = calls(graph)
    node.target, node.args = lambda x, text: (x, text), (*node.args[:1], text)
    assert FxBackend().emit(graph, emission(graph)).call([torch.ones(2)])[0][1] == text


def test_a_function_is_freed_with_the_graph() -> None:
    graph, _ = graph_and_inputs(stacked(layer))
    emitted = FxBackend().emit(graph, emission(graph))
    call = weakref.ref(emitted.call)
    del emitted
    gc.collect()
    assert call() is None
