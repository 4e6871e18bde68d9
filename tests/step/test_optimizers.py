"""Optimizers in a compiled step: parameters, state and random numbers are eager's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.step import optimizers
from tests.step.comparison import Pair, train

PLAIN: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1},
    "SGD nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01},
    "Adam amsgrad": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01},
    "AdamW maximize": {"lr": 0.01, "maximize": True},
    "Adadelta": {"lr": 0.5},
    "Adafactor": {"lr": 0.5},
    "Adagrad": {"lr": 0.1},
    "Adamax": {"lr": 0.01},
    "ASGD": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "centered": True},
    "Rprop": {"lr": 0.01},
}


def made(name: str, options: dict[str, Any]) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda params: getattr(torch.optim, name.split()[0])(params, **options)


@pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "foreach"])
@pytest.mark.parametrize("name", PLAIN)
def test_torch_optim(name: str, foreach: bool) -> None:
    step = train(Pair.of(made(name, {**PLAIN[name], "foreach": foreach})), num_steps=6)
    assert len(step.graphs) == 1


@pytest.mark.parametrize("name", ["SGD", "SGD nesterov", "Adam", "AdamW", "Adagrad"])
def test_fused(name: str) -> None:
    step = train(Pair.of(made(name, {**PLAIN[name], "fused": True})))
    assert len(step.graphs) == 1
    assert "_fused_" in str(step.graphs[0]["inference"].code)


def test_muon() -> None:
    train(Pair.of(lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02)))


@pytest.mark.parametrize(
    ("name", "options"),
    [("RAdam", {"foreach": False}), ("RAdam", {"foreach": True}), ("ASGD", {"foreach": False, "t0": 3.0})],
    ids=["RAdam one by one", "RAdam foreach", "ASGD"],
)
def test_way_that_is_chosen_by_the_step_count(name: str, options: dict[str, Any]) -> None:
    """`RAdam` begins to adapt in its sixth step, `ASGD` to average behind `t0`."""
    step = train(Pair.of(made(name, {"lr": 0.01, **options})), num_steps=8)
    assert len(step.graphs) == 2


def test_shampoo() -> None:
    step = train(Pair.of(optimizers.Shampoo), num_steps=8)
    assert len(step.graphs) == 2, "with new roots, and without"


@pytest.mark.parametrize(
    "kind",
    [optimizers.Counting, optimizers.Fixed, optimizers.KeepingGradients, optimizers.Skipping],
    ids=lambda kind: kind.__name__,
)
def test_of_ones_own(kind: type[torch.optim.Optimizer]) -> None:
    assert len(train(Pair.of(kind), num_steps=6).graphs) == 1


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda at: 1 / (at + 1)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
}


@pytest.mark.parametrize("fused", [False, True], ids=["one by one", "fused"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_compiles_once(name: str, fused: bool) -> None:
    """`OneCycleLR` changes the betas, too."""
    pair = Pair.of(made("AdamW", {"lr": 0.01, "fused": fused}))
    schedules = {id(optimizer): SCHEDULES[name](optimizer) for optimizer in pair.optimizers}
    step = train(pair, num_steps=7, between=lambda optimizer: schedules[id(optimizer)].step())
    assert len(step.graphs) == 1


def test_learning_rate_that_is_a_tensor() -> None:
    pair = Pair.of(made("AdamW", {"lr": torch.tensor(0.01), "foreach": False}))
    step = train(pair, between=lambda optimizer: optimizer.param_groups[0]["lr"].mul_(0.5))
    assert len(step.graphs) == 1


def test_way_that_is_chosen_by_a_learning_rate_that_is_a_tensor() -> None:
    """`Adafactor` takes the smaller one of it and of what follows from the step count."""
    pair = Pair.of(made("Adafactor", {"lr": torch.tensor(0.45)}))
    assert len(train(pair, num_steps=8).graphs) == 2


def test_groups_with_hyperparameters_of_their_own() -> None:
    def grouped(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [param for param in params if param.dim() > 1]
        others = [param for param in params if param.dim() <= 1]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.1, "betas": (0.8, 0.9)}]
        )

    train(Pair.of(grouped))


def test_hyperparameter_that_is_changed_once() -> None:
    def decay(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["weight_decay"] += 0.25

    step = train(Pair.of(made("AdamW", {"lr": 0.01})), num_steps=6, between=decay)
    assert len(step.graphs) == 1, "it was seen to differ before the first step that was compiled"


def _replace_step(optimizer: Any) -> None:
    step = optimizer.step

    def and_decay() -> None:
        step()
        with torch.no_grad():
            for group in optimizer.param_groups:
                torch._foreach_mul_(group["params"], 0.5)

    optimizer.step = and_decay


CHANGES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda optimizer: setattr(optimizer, "factor", 0.5),
    "item": lambda optimizer: optimizer.by_kind.update(matrix=0.25),
    "other dictionary": lambda optimizer: setattr(optimizer, "by_kind", {**optimizer.by_kind, "matrix": 2.0}),
    "tensor": lambda optimizer: optimizer.by_kind.update(vector=torch.tensor(2.0)),
    "what is in a tensor": lambda optimizer: optimizer.by_kind["vector"].fill_(2.0),
    "default": lambda optimizer: optimizer.defaults.update(lr=0.5),
    "global variable": lambda _: setattr(optimizers, "strength", 3.0),
    "its step": _replace_step,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_an_optimizer_reads_may_change_between_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "strength", 1.0)
    pair = Pair.of(optimizers.Adjustable)
    num_steps = 0

    def change(optimizer: torch.optim.Optimizer) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps in (5, 6):  # once for each of the pair
            CHANGES[name](optimizer)

    train(pair, num_steps=5, between=change)
