"""Numbers that Python reads in a step, and that change from call to call: a program for all."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aotdist
from tests.step.written import Build, Written, classifier, compiled_beside_eager, cross_entropy, labelled

RATES = np.linspace(0.001, 0.01, 20)


class Averaged:
    """A model, its optimizer, and an average of it that follows by a decay that Python computes."""

    def __init__(self) -> None:
        self.model, self.average = classifier(), classifier().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(self.model, x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def follow(self, decay: float) -> None:
        for ours, theirs in zip(self.average.parameters(), self.model.parameters(), strict=True):
            ours.mul_(decay).add_(theirs, alpha=1 - decay)

    def written(self, step: Callable[..., Any], **options: Any) -> Written:
        return Written(step, [self.model, self.average], [self.optimizer], **options)


decay = 0.9
"""A global variable that steps read."""


class Holder:
    """Has a number in each kind of place."""

    of_class = 0.9

    def __init__(self) -> None:
        self.module = nn.Module()
        self.module.decay = 0.9  # type: ignore[assignment]
        self.attribute, self.items, self.nested = 0.9, [0.1, 0.9], {"average": {"decay": 0.9}, "other": 3}
        self.epoch = 0


def _global() -> float:
    return decay


def _set_global(value: float) -> None:
    globals()["decay"] = value


PLACES: dict[str, tuple[Callable[[Holder], float], Callable[[Holder, float], Any]]] = {
    "an attribute": (lambda held: held.attribute, lambda held, value: setattr(held, "attribute", value)),
    "an attribute of a module": (
        lambda held: held.module.decay,  # type: ignore[return-value]
        lambda held, value: setattr(held.module, "decay", value),
    ),
    "an item of a list": (lambda held: held.items[1], lambda held, value: held.items.__setitem__(1, value)),
    "an item of a dictionary in a dictionary": (
        lambda held: held.nested["average"]["decay"],  # type: ignore[index]
        lambda held, value: held.nested["average"].__setitem__("decay", value),  # type: ignore[union-attr]
    ),
    "a global variable": (lambda held: _global(), lambda held, value: _set_global(value)),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_number_that_is_assigned_between_calls(place: str) -> None:
    """As `1 - decay`, and `decay` itself, each an operation of Python's."""
    read, write = PLACES[place]

    def build() -> Written:
        trained, held = Averaged(), Holder()
        write(held, 0.9)

        def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float]:
            loss = trained.train(x, y)
            trained.follow(read(held) * 0.99 + 0.005)
            return loss, 1 - read(held)

        return trained.written(step, between=lambda at: write(held, 0.9 + at / 200))

    assert len(compiled_beside_eager(build, num_steps=8).graphs) == 2


def test_a_variable_that_is_closed_over() -> None:
    def build() -> Written:
        trained, temperature = Averaged(), 1.0

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = cross_entropy(trained.model, x, y) / max(0.5, temperature)
            loss.backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
            return loss.detach()

        def between(at: int) -> None:
            nonlocal temperature
            temperature = 2 - at / 10

        return trained.written(step, between=between)

    assert len(compiled_beside_eager(build, num_steps=8).graphs) == 2


def test_a_branch_by_an_epoch() -> None:
    def build() -> Written:
        trained, held = Averaged(), Holder()

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = trained.train(x, y)
            if held.epoch > 3:
                trained.follow(0.9 + held.epoch / 100)
            return loss

        return trained.written(step, between=lambda at: setattr(held, "epoch", at))

    assert (
        len(compiled_beside_eager(build, num_steps=9).graphs) == 3
    )  # for one epoch, before the fourth, after


def test_what_counts_is_replaced_between_calls() -> None:
    """A branch is chosen by the number that the call finds."""

    def build() -> Written:
        trained, held = Averaged(), types.SimpleNamespace(state=types.SimpleNamespace(updates=0))

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = trained.train(x, y)
            held.state.updates += 1
            if held.state.updates > 3:
                trained.follow(1 - 0.5 ** (held.state.updates + 1.5))
            return loss

        def between(at: int) -> None:
            if at in (5, 7):
                held.state = types.SimpleNamespace(updates=at - 5)

        return trained.written(step, between=between, logs=lambda: held.state.updates)

    assert len(compiled_beside_eager(build, num_steps=12).graphs) <= 3


class ModelEMA:
    """As YOLO's: counts its updates, and its decay follows."""

    def __init__(self, trained: Averaged, tau: float = 20) -> None:
        self.trained, self.updates = trained, 0
        self.decay = lambda updates: 0.9999 * (1 - math.exp(-updates / tau))

    def update(self) -> None:
        self.updates += 1
        self.trained.follow(self.decay(self.updates))


class EMAModel:
    """As of diffusers: keeps the decay, too."""

    def __init__(self, trained: Averaged) -> None:
        self.trained, self.optimization_step, self.cur_decay_value = trained, 0, 0.0

    def update(self) -> None:
        self.optimization_step += 1
        step = max(0, self.optimization_step - 1)
        decay = 0.0 if step <= 0 else max(min(1 - (1 + step / 1.0) ** -0.75, 0.99), 0.0)
        self.cur_decay_value = decay
        self.trained.follow(decay)


def counting(kind: type[Any]) -> Build:
    def build() -> Written:
        trained = Averaged()
        average = kind(trained)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = trained.train(x, y)
            average.update()
            return loss

        def logs() -> Any:
            return {key: value for key, value in vars(average).items() if isinstance(value, (int, float))}

        return trained.written(step, logs=logs)

    return build


@pytest.mark.parametrize("kind", [ModelEMA, EMAModel])
def test_averages_that_count(kind: type[Any]) -> None:
    assert len(compiled_beside_eager(counting(kind), num_steps=9).graphs) == 1


@pytest.mark.slow
def test_averages_that_count_by_inductor() -> None:
    compiled = compiled_beside_eager(counting(ModelEMA), num_steps=4, backend="inductor")
    assert len(compiled.graphs) == 1


def test_numbers_in_arguments_of_any_form() -> None:
    """In containers, and of NumPy's kind, which is a float."""

    def build() -> Written:
        trained = Averaged()

        def step(x: torch.Tensor, y: torch.Tensor, options: Any, rate: float) -> torch.Tensor:
            loss = trained.train(x, y) * rate**2
            trained.follow(options["decays"][0] * 0.99)
            return loss

        def batch(at: int) -> tuple[Any, ...]:
            return *labelled(at), {"decays": [0.9 + at / 100]}, RATES[at]

        return trained.written(step, batch=batch)

    assert len(compiled_beside_eager(build, num_steps=8).graphs) == 2


@pytest.mark.parametrize("of_numpy", [False, True])
def test_hyperparameters_by_a_schedule_in_an_array(of_numpy: bool) -> None:
    def build() -> Written:
        trained = Averaged()

        def between(at: int) -> None:
            for group in trained.optimizer.param_groups:
                group["lr"] = RATES[at] if of_numpy else float(RATES[at])
                group["weight_decay"] = RATES[3] if of_numpy else 0.1

        return trained.written(trained.train, between=between)

    assert len(compiled_beside_eager(build, num_steps=8).graphs) == 1


@dataclass
class Metrics:
    """What a step logs."""

    loss: torch.Tensor
    rates: dict[str, float]


def test_rates_among_metrics() -> None:
    """In an object that is returned, and in a dictionary that is kept."""
    trained, log = Averaged(), list[dict[str, Any]]()

    @functools.partial(aotdist.compile, backend="fx")
    def step(x: torch.Tensor, y: torch.Tensor) -> Metrics:
        loss, (group,) = trained.train(x, y), trained.optimizer.param_groups
        log.append({"loss": loss, "lr": group["lr"]})
        return Metrics(loss, {"lr": group["lr"], "per_cent": group["lr"] * 100})

    for at in range(4):
        trained.optimizer.param_groups[0]["lr"] = float(RATES[at])
        metrics = step(*labelled(at))
        assert metrics.rates == {"lr": RATES[at], "per_cent": RATES[at] * 100}
        assert torch.equal(metrics.loss, log[at]["loss"])
    assert [kept["lr"] for kept in log] == list(RATES[:4])
    assert len(step.graphs) == 1


def test_an_int_may_be_a_size_too() -> None:
    """`self.position` counts, and says where the queue is written."""

    def build() -> Written:
        trained, queue = Averaged(), torch.zeros(4, 24)
        held = types.SimpleNamespace(position=0)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = trained.train(x, y)
            with torch.no_grad():
                keys, at = trained.average(x), held.position
                queue[:, at : at + len(keys)] = keys.T
                held.position = (at + len(keys)) % 24
            return loss

        return trained.written(step, logs=lambda: (queue, vars(held)))

    assert len(compiled_beside_eager(build, num_steps=9).graphs) <= 3
