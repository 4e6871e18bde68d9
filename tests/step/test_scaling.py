"""`GradScaler` in a compiled step: steps that overflow are skipped, and the scale follows, as in eager."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import aotdist
from aotdist.step.program import StepProgram
from tests.step import optimizers
from tests.step.comparison import Pair, Plain, batch, loss_of, same, trained

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "AdamW": ("AdamW", {"lr": 0.01}),
    "AdamW fused": ("AdamW", {"lr": 0.01, "fused": True}),
}
OVERFLOWING = (2, 5)
"""Steps whose batch is infinite."""


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def batch_of(step: int) -> torch.Tensor:
    return batch(step) * float("inf") if step in OVERFLOWING else batch(step)


@pytest.mark.parametrize("clip", [None, 0.05], ids=["whole", "clipped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_overflow(name: str, clip: float | None) -> None:
    kind, options = OPTIMIZERS[name]
    pair = Pair.of(lambda params: getattr(torch.optim, kind)(params, **options), Plain)
    scalers = scaler(), scaler()
    eager, optimizer = pair.models[0], pair.optimizers[0]
    step = aotdist.train_step(
        pair.models[1], loss_of, pair.optimizers[1], clip=clip, scaler=scalers[1], backend="fx"
    )
    for at in range(8):
        expected = loss_of(eager, batch_of(at))
        scalers[0].scale(expected).backward()
        if clip is not None:
            scalers[0].unscale_(optimizer)
            nn.utils.clip_grad_norm_(trained(eager), clip)
        scalers[0].step(optimizer)
        scalers[0].update()
        optimizer.zero_grad()
        assert same(step(batch_of(at)), expected.detach())
        assert scalers[0].state_dict() == scalers[1].state_dict(), at
        pair.assert_same(at)
    assert len(step.graphs) == 1


@pytest.mark.parametrize("clip", [None, 0.05], ids=["whole", "clipped"])
def test_overflow_in_one_of_two_optimizers(clip: float | None) -> None:
    """The other one steps, and the scale shrinks."""
    torch.manual_seed(0)
    models = [Plain()]
    models.append(copy.deepcopy(models[0]))
    both = [
        [torch.optim.SGD(model.second.parameters(), lr=0.1), torch.optim.AdamW(model.first.parameters())]
        for model in models
    ]
    scalers = scaler(), scaler()

    def infinite_in_first(model: Plain, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return model.second(x).square().mean() + (model.first(x) * factor).mean()

    step = aotdist.train_step(
        models[1], infinite_in_first, both[1], clip=clip, scaler=scalers[1], backend="fx"
    )
    for at, factor in enumerate([1.0, 1.0, math.inf, 1.0, 1.0, 1.0]):
        expected = infinite_in_first(models[0], batch(at), torch.tensor(factor))
        scalers[0].scale(expected).backward()
        if clip is not None:
            for optimizer in both[0]:
                scalers[0].unscale_(optimizer)
            nn.utils.clip_grad_norm_(models[0].parameters(), clip)
        for optimizer in both[0]:
            scalers[0].step(optimizer)
        scalers[0].update()
        for optimizer in both[0]:
            optimizer.zero_grad()
        assert same(step(batch(at), torch.tensor(factor)), expected.detach())
        assert scalers[0].state_dict() == scalers[1].state_dict(), at
        for one, other in zip(both[0], both[1], strict=True):
            Pair((models[0], models[1]), (one, other)).assert_same(at)
    assert len(step.graphs) == 1


def test_first_step_that_overflows() -> None:
    """The optimizer has no state after it: the next one makes it."""
    pair = Pair.of(lambda params: torch.optim.AdamW(params, lr=0.01), Plain)
    step = aotdist.train_step(pair.models[1], loss_of, pair.optimizers[1], scaler=scaler(), backend="fx")
    for at in (2, 2, 0, 1, 3):
        step(batch_of(at))
    assert all(entry["step"] == 3 for entry in pair.optimizers[1].state.values())


def test_first_steps_that_overflow_are_not_traced_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale begins too high: the optimizer gets its state when a step is not skipped any more."""
    pair, tried = Pair.of(lambda params: torch.optim.AdamW(params, lr=0.01), Plain), list[int]()
    step = aotdist.train_step(pair.models[1], loss_of, pair.optimizers[1], scaler=scaler(), backend="fx")
    program = StepProgram.__call__

    def noted(*given: Any) -> Any:
        tried.append(at)
        return program(*given)

    monkeypatch.setattr(StepProgram, "__call__", noted)
    for at in range(8):
        step(batch(at) * (float("inf") if at < 5 else 1.0))
    assert tried == [1, 6, 7]  # the second call meets the optimizer, and the sixth makes its state
    assert len(step.graphs) == 1


def test_scaler_that_is_switched_off() -> None:
    pair = Pair.of(lambda params: torch.optim.AdamW(params, lr=0.01), Plain)
    off = torch.amp.GradScaler("cpu", enabled=False)
    step = aotdist.train_step(pair.models[1], loss_of, pair.optimizers[1], scaler=off, backend="fx")
    for at in range(3):
        loss_of(pair.models[0], batch(at)).backward()
        pair.optimizers[0].step()
        pair.optimizers[0].zero_grad()
        step(batch(at))
        pair.assert_same(at)


def test_other_rules_between_steps() -> None:
    """Factors and interval are set anew, or loaded with the scaler's state."""
    pair = Pair.of(lambda params: torch.optim.AdamW(params, lr=0.01), Plain)
    scalers = scaler(), scaler()
    step = aotdist.train_step(pair.models[1], loss_of, pair.optimizers[1], scaler=scalers[1], backend="fx")
    as_written = aotdist.train_step(
        pair.models[0], loss_of, pair.optimizers[0], scaler=scalers[0], backend="eager"
    )
    for at in range(10):
        as_written(batch_of(at))
        step(batch_of(at))
        assert scalers[0].state_dict() == scalers[1].state_dict(), at
        pair.assert_same(at)
        for one in scalers:
            match at:
                case 2:
                    one.set_growth_interval(1)
                case 4:
                    one.set_backoff_factor(0.25)
                case 6:
                    one.load_state_dict({**one.state_dict(), "growth_factor": 4.0})
                case _:
                    pass


def test_optimizer_that_counts_in_python_is_refused() -> None:
    model = Plain()
    step = aotdist.train_step(
        model, loss_of, optimizers.Counting(trained(model)), scaler=scaler(), backend="fx"
    )
    step(batch(0))
    with pytest.raises(aotdist.UnsupportedProgram, match="Counting counts in Python"):
        step(batch(1))
    assert step.graphs == []
