"""A loss beside other results: its backward is compiled with the forward, any other when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import aotdist
from aotdist.codegen.contract import Emission, Emitted
from aotdist.codegen.fx import FxBackend
from aotdist.codegen.inductor import InductorBackend
from aotdist.errors import UnsupportedProgram
from aotdist.program import Graph

LOSS = ["out[0]"]
ALL = ["out[0]", "out[1]", "out[2]"]


class Model(nn.Module):
    """A loss, the logits that it is made of, and a result that it has nothing to do with."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.beside = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.head(self.body(x).tanh())
        return F.cross_entropy(logits, torch.arange(6) % 3), logits, self.beside(x).sin()


def taken(graph: Graph) -> list[str]:
    """The results whose gradients a backward takes."""
    return [slot.path for slot in graph.ins if slot.role == "tangent"]


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """For each backward of the program that is compiled, the results whose gradients it takes."""
    found: list[list[str]] = []
    for backend in (FxBackend, InductorBackend):

        def noting(self: Any, graph: Graph, emission: Emission, emit: Any = backend.emit) -> Emitted:
            if emission.kind == "backward" and set(taken(graph)) <= set(ALL):
                found.append(taken(graph))
            return emit(self, graph, emission)

        monkeypatch.setattr(backend, "emit", noting)
    return found


def total(*results: torch.Tensor) -> torch.Tensor:
    return torch.stack([result.square().sum() for result in results]).sum()


def penalty(loss: torch.Tensor, model: nn.Module) -> None:
    body = list(model.body.parameters())
    total(*torch.autograd.grad(loss, body, create_graph=True)).backward()


def hooked(result: torch.Tensor, loss: torch.Tensor) -> None:
    result.register_hook(lambda grad: grad * 2)
    loss.backward()


def in_turn(*losses: torch.Tensor) -> None:
    for loss in losses:
        loss.backward(retain_graph=True)


Step = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor], Any]

STEPS: dict[str, tuple[list[list[str]], Step]] = {
    "the loss": ([LOSS], lambda _, loss, logits, other: loss.backward()),
    "the loss, scaled": ([], lambda _, loss, logits, other: (loss * 2).backward()),
    "the loss, twice": ([], lambda _, loss, logits, other: in_turn(loss, loss)),
    "all": ([ALL], lambda _, *results: total(*results).backward()),
    "all, then the loss": ([], lambda _, *results: in_turn(total(*results), results[0])),
    "the loss and the logits": ([ALL[:2]], lambda _, loss, logits, other: total(loss, logits).backward()),
    "the loss, then others": (
        [ALL[1:2], ALL[2:]],
        lambda _, loss, logits, other: in_turn(loss, total(logits), total(other)),
    ),
    "what shares nothing, then the loss": (
        [],
        lambda _, loss, logits, other: (total(other).backward(), loss.backward()),
    ),
    "a hook on the loss": ([], lambda _, loss, logits, other: hooked(loss, loss)),
    "a hook on the logits": ([LOSS, LOSS], lambda _, loss, logits, other: hooked(logits, loss)),  # in parts
    "gradients of gradients": ([], lambda model, loss, logits, other: penalty(loss, model)),
}
"""What is differentiated, one after the other, and which backwards are then compiled."""


def stepped(model: nn.Module, step: Step) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    x = torch.randn(6, 4, requires_grad=True)
    model.zero_grad()
    results = model(x)
    step(model, *results)
    return [*results, x.grad, *(param.grad for param in model.parameters())]


def seeded() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("backend, names", [("fx", list(STEPS)), ("inductor", ["the loss", "all"])])
def test_as_in_eager(backend: str, names: list[str], emitted: list[list[str]]) -> None:
    eager, compiled, exactly = seeded(), seeded(), {"rtol": 0, "atol": 0} if backend == "fx" else {}
    aotdist.compile(compiled, backend=backend)
    for name in names:
        expected, step = STEPS[name]
        emitted.clear()
        for mine, theirs in zip(stepped(compiled, step), stepped(eager, step), strict=True):
            assert_close(mine, theirs, **exactly, msg=lambda said, name=name: f"{name}: {said}")
        assert emitted == expected, name


SCALES = torch.linspace(-1, 1, 3)

OTHERS: dict[str, tuple[list[str], Callable[[torch.Tensor], Any]]] = {
    "one result": (LOSS, lambda x: x.sin().sum()),
    "no scalar": (ALL[:2], lambda x: (x.sin(), x.cos())),
    "two scalars": (ALL, lambda x: (x.sin().sum(), x.cos().sum(), x.exp())),
    "a scalar of no gradient": (ALL[1:], lambda x: (x.detach().sum(), x.cos(), x.exp())),
    "a loss that is not the first": (ALL[1:2], lambda x: (x.sin(), x.cos().sum())),
    "a write that can be differentiated": (LOSS, lambda x: x.mul_(SCALES).sin().sum()),
}
"""Programs, and the results that the backward compiled with the forward takes gradients of."""


def test_which_result_is_the_loss(emitted: list[list[str]]) -> None:
    for name, (expected, fn) in OTHERS.items():
        emitted.clear()
        aotdist.compile(fn, backend="fx")(torch.ones(3, requires_grad=True) * 2)
        assert emitted == [expected], name


class Failing(FxBackend):
    """Fails to compile the backward of all results, and leaves that to `fx`."""

    def emit(self, graph: Graph, emission: Emission) -> Emitted:
        def fail() -> None:
            if taken(graph) == ALL:
                raise UnsupportedProgram("no kernel for that", stage="codegen", fix="none")

        return replace(FxBackend().emit(graph, emission), finish=fail, else_fx=True)


def test_another_backward_that_fails_to_compile_is_run_by_operator() -> None:
    eager, compiled = seeded(), aotdist.compile(seeded(), backend=Failing())
    _, step = STEPS["all"]
    expected = stepped(eager, step)
    with pytest.warns(UserWarning, match="no kernel for that"):
        found = stepped(compiled, step)
    assert_close(found, expected, rtol=0, atol=0)
