"""Decompositions of a graph after its trace: equal calls are recorded once, and results lie as they did."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from aotdist.codegen.decompose import decompose
from aotdist.codegen.inductor import InductorBackend
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.operators import OpOverload
from tests.codegen.captured import branching, calls, captured

ATEN = torch.ops.aten


def table(op: OpOverload, made_of: Callable[..., Any]) -> Mapping[OpOverload, Callable[..., Any]]:
    """A table of one decomposition."""
    return {op: made_of}


def test_equal_calls_are_recorded_once() -> None:
    """Two kinds of arguments: the decomposition runs for each to ask, and to record."""
    asked = list[torch.Size]()

    def doubled(x: torch.Tensor) -> torch.Tensor:
        asked.append(x.shape)
        return x + x

    x, y = torch.randn(2, 3), torch.randn(5)
    graph = captured(lambda x, y: [x.sin(), x.sin().sin(), y.sin()], [x, y])
    decompose(graph.gm, table(ATEN.sin.default, doubled))
    graph.gm.recompile()
    assert {node.target for node in calls(graph)} == {ATEN.add.Tensor}
    assert sorted(set(asked)) == [x.shape, y.shape] and len(asked) == 4
    for result, expected in zip(graph.gm(x, y), [2 * x, 4 * x, 2 * y], strict=True):
        assert torch.equal(result, expected)


def test_copies_have_memory_of_their_own() -> None:
    """Compilers look which values share memory: views lie in what they are views of, and in nothing else."""
    made = table(ATEN.sin.default, lambda x: x.cos().view(-1).view(x.shape))
    graph = captured(lambda x: [x.sin(), x.sin()], [torch.randn(2, 3)])
    decompose(graph.gm, made)
    storages = [node.meta["val"].untyped_storage()._cdata for node in calls(graph)]
    assert len(storages) == 6 and len(set(storages)) == 2


def test_results_keep_their_strides() -> None:
    """What follows was traced with them: a view of a transposed result needs it transposed."""
    x = torch.randn(3, 4).t()
    graph = captured(lambda x: [x.sin().t().view(-1)], [x])
    decompose(graph.gm, table(ATEN.sin.default, lambda x: (x + x).contiguous()))
    graph.gm.recompile()
    (result,) = graph.gm(x)
    assert torch.equal(result, (2 * x).t().reshape(-1))


def test_constants_become_attributes() -> None:
    """`torch.tensor` in a decomposition, as Inductor's of `searchsorted` with a number has it."""
    x = torch.tensor([0.0, 1.0, 2.0])
    graph = captured(lambda x: [torch.searchsorted(x, 0.5), torch.bucketize(1.5, x)], [x])
    decompose(graph.gm, InductorBackend().decompositions())
    graph.gm.recompile()
    assert [int(result) for result in graph.gm(x)] == [1, 2] and len(graph.held()) == 2


def test_branches_are_decomposed_in_copies() -> None:
    """Other graphs hold the same branches."""
    graph = captured(branching, [torch.randn(3)])
    whole = graph.copied()
    decompose(graph.gm, table(ATEN.sin.default, torch.cos))
    branches = [
        {node.target for node in held.graph.nodes if node.op == "call_function"} for held in graph.held()
    ]
    assert branches == [{ATEN.cos.default}] * 2
    assert any(node.target is ATEN.sin.default for held in whole.held() for node in held.graph.nodes)


def test_several_results_are_replaced_one_by_one() -> None:
    """One that nobody reads is dropped."""
    graph = captured(lambda x: [x.max(0)[0]], [torch.tensor([[1.0, 5.0], [3.0, 2.0]])])
    decompose(graph.gm, table(ATEN.max.dim, lambda x, dim: (x.amax(dim), x.argmax(dim))))
    assert [node.target for node in calls(graph)] == [ATEN.amax.default]


def test_a_failing_decomposition_names_operator_and_line() -> None:
    """The error says what failed, and what to do."""

    def failing(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no such thing\nat all")

    graph = captured(lambda x: [x.sin()], [torch.randn(2)])
    calls(graph)[0].meta["source"] = "train.py:7"
    with pytest.raises(UnsupportedProgram, match=r"`aten.sin.default` fails: no such thing\n.*train.py:7"):
        decompose(graph.gm, table(ATEN.sin.default, failing))


def test_the_rewrites_of_inductor_find_nothing_left_to_decompose() -> None:
    """The trace leaves operators whole; a prepared graph has none that Inductor does not lower."""
    backend = InductorBackend()
    graph = captured(lambda x: [torch.nn.functional.silu(x).log_softmax(-1)], [torch.randn(4, 8)])
    assert ATEN.silu.default in backend.decompositions()
    prepared = backend.prepare_joint(graph)
    without_memory = captured(lambda x: [x, torch._efficientzerotensor(3)], [torch.randn(3)])
    assert all(
        node.target is not ATEN._efficientzerotensor.default
        for node in calls(backend.prepare_joint(without_memory))
    )
    assert not {ATEN.silu.default, ATEN._log_softmax.default} & {node.target for node in calls(prepared)}
