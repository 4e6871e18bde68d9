"""The law of functional random numbers: seed and offset decide, and the generator moves once a call."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from aotdist.convention.rng import SLOTS
from aotdist.program import Program
from tests.convention.lowering import call_of, lower_rng, program_of

PROGRAMS: dict[str, Callable[..., list[torch.Tensor]]] = {
    "dropout": lambda x: [F.dropout(x, 0.5)],
    "several": lambda x: [torch.rand_like(x), torch.randn(3), F.dropout(x) * torch.rand(4)],
    "a write": lambda x: [x.clone().uniform_(), x],
    "a layout": lambda x: [torch.rand_like(x.t()), torch.bernoulli(x.sigmoid().t())],
    "no draw": lambda x: [x * 2],
}


@pytest.fixture(params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> Program:
    return program_of(PROGRAMS[request.param], [torch.ones(3, 4)])


def test_the_inner_program_is_a_function(program: Program) -> None:
    inner, _ = lower_rng(program, torch.device("cpu"))
    assert tuple(inner.ins)[-2:] == SLOTS
    state = torch.get_rng_state()
    seed, offset = torch.tensor(5), torch.tensor(0)
    first, second = (call_of(inner)([torch.ones(3, 4), seed, offset]) for _ in range(2))
    assert all(map(torch.equal, first, second))
    assert torch.equal(torch.get_rng_state(), state)


def test_lifted_it_looks_like_the_program(program: Program) -> None:
    inner, plan = lower_rng(program, torch.device("cpu"))
    lifted = plan.lift(call_of(inner))
    for ours, eager in zip(lifted([torch.ones(3, 4)]), call_of(program)([torch.ones(3, 4)]), strict=True):
        assert (ours.size(), ours.stride(), ours.dtype) == (eager.size(), eager.stride(), eager.dtype)


def test_the_generator_decides_and_moves_once_a_call(program: Program) -> None:
    inner, plan = lower_rng(program, torch.device("cpu"))
    lifted = plan.lift(call_of(inner))
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append([*lifted([torch.ones(3, 4)]), *lifted([torch.ones(3, 4)]), torch.get_rng_state()])
    assert all(map(torch.equal, *runs))
    torch.manual_seed(3)
    torch.empty((), dtype=torch.int64).random_()
    torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(torch.get_rng_state(), runs[0][-1])
