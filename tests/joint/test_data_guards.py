"""What is assumed of a number is asked at each call: a guard holds exactly where the artifact fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

import aotdist
from aotdist.api import compiled_call
from aotdist.facts import DataGuard
from aotdist.joint.data_guards import DataGuards, NotKnown, as_function, result_of
from aotdist.program import PrimalIdx
from aotdist.runtime.fit import MISS

aten = torch.ops.aten


def graph() -> tuple[Node, Node, Node]:
    """An argument, a literal that no call changes, and whether the argument is like it everywhere."""
    nodes = Graph()
    argument = nodes.placeholder("x")
    literal = nodes.call_function(aten.arange.default, (3,), {"device": torch.device("cpu")})
    same = nodes.call_function(aten.eq.Tensor, (argument, literal))
    return argument, literal, nodes.call_function(aten.all.default, (same,))


def test_what_follows_from_nothing_is_known_and_what_follows_from_an_argument_is_not() -> None:
    root = torch.nn.Module()
    argument, literal, same = graph()
    assert result_of(aten.sum.default, (literal,), {}, root) == 3
    with pytest.raises(NotKnown):
        result_of(bool, (same,), {}, root)
    assert result_of(bool, (same,), {}, root, {argument: torch.arange(3)}) is True
    ask = as_function((same,), [argument], root)
    assert [ask(torch.arange(3))[0].item(), ask(torch.ones(3))[0].item()] == [True, False]


def test_a_guard_holds_for_calls_with_the_same_answer() -> None:
    argument, _, same = graph()
    guards = DataGuards()
    guards.note_data(argument, PrimalIdx(0), 0, torch.arange(3))
    assert guards.answer(same, torch.nn.Module())
    (guard,) = guards.given
    assert guard.of == ((PrimalIdx(0), 0),) and guard.holds == (True,)
    assert guard.is_same(torch.arange(3)) and not guard.is_same(torch.ones(3))
    assert DataGuard(guard.ask, (False,)).is_same(torch.ones(3))


CALLS: dict[str, tuple[Any, list[tuple[Any, ...]], list[tuple[Any, ...]]]] = {
    "a size": (lambda x: x * x.shape[0], [(torch.ones(3, 2),), (torch.ones(7, 2),)], [(torch.ones(1, 2),)]),
    "a condition on a size": (
        lambda x: x * 2 if x.shape[0] > 4 else x * 3,
        [(torch.ones(5, 2),), (torch.ones(9, 2),)],
        [(torch.ones(3, 2),), (torch.ones(4, 2),)],
    ),
    "a number": (lambda x, n: x * n, [(torch.ones(3), 2), (torch.zeros(3), 2)], [(torch.ones(3), 3)]),
}
"""A program; calls that its first artifact fits, the first of which it is made for; and others."""


@pytest.mark.parametrize("name", CALLS)
def test_an_artifact_fits_exactly_the_calls_of_which_its_guards_hold(name: str) -> None:
    program, fitting, others = CALLS[name]
    compiled = aotdist.compile(program, backend="fx", settings={"dynamic": True})
    compiled(*fitting[0])
    (artifact,) = compiled_call(compiled).artifacts
    for call in fitting:
        result = artifact.call(call, {})
        assert result is not MISS and torch.equal(result, program(*call))
    assert all(artifact.call(call, {}) is MISS for call in others)
