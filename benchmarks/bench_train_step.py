"""Whole training step: the Llama with AdamW, its optimizer apart or in the same graph.

Forward, loss, backward, AdamW (one parameter after the other, PyTorch's default on the CPU) and `zero_grad`.
What can be won is the optimizer's share. On two cores of a Xeon, AdamW takes 15 of 102 ms apart, and 5 in the
graph, where it moves 220 MB at the memory's speed: 0.90 is the least there. On two of a Zen 5 it is 10 of 84
ms and 3: 0.92. Products (52 ms) and attention (14) are the same on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, assert_never

import torch
from torch import Tensor, nn

import aotdist
from benchmarks import workers
from benchmarks.effort import Case, Effort
from benchmarks.models import Llama, LlamaShape, make_batch
from benchmarks.timing import Contender, Pace, Series, as_series, take_turns
from benchmarks.verdicts import Target

Way = Literal["eager", "torch.compile", "aotdist.compile", "aotdist.train_step"]

WAYS: tuple[Way, ...] = ("eager", "torch.compile", "aotdist.compile", "aotdist.train_step")
CASE = "single, 1 rank"
TARGETS = (
    Target(
        CASE,
        "step with AdamW",
        "aotdist.train_step",
        ("aotdist.compile",),
        limit=0.9,
        prediction=0.85,
        reason="AdamW moves 28 bytes a parameter in one kernel, and about 130 in ten operators",
    ),
)


def cases(effort: Effort) -> list[Case]:
    """Milliseconds a step, by contender."""
    pace = Pace(rounds=5, warmup=3) if effort.quick else Pace(rounds=15, warmup=4)
    return [Case(CASE, partial(_measure, effort.shape, pace, effort.environment))]


def _measure(shape: LlamaShape, pace: Pace, environment: Mapping[str, str]) -> list[Series]:
    # Each thread keeps its core: else the system puts both on one, now and then, for 8 ms of anyone's step.
    pinned = {**environment, "OMP_PROC_BIND": "true"}
    seconds = workers.call(CASE, train_in_turns, (shape, pace), environment=pinned)
    return as_series(seconds, case=CASE, quantity="step with AdamW", unit="ms")


def train_in_turns(job: tuple[LlamaShape, Pace]) -> dict[str, list[float]]:
    """Seconds a step, by contender.

    Raises:
        RuntimeError: after all steps, a contender's loss differs from eager's by more than a thousandth.
    """
    shape, pace = job
    steps = {way: make_step(shape, way) for way in WAYS}
    seconds = take_turns([Contender(way, run=step) for way, step in steps.items()], pace)
    losses = {way: float(step()) for way, step in steps.items()}
    for way, loss in losses.items():
        if not math.isclose(loss, losses["eager"], rel_tol=1e-3):
            raise RuntimeError(f"{way}: the loss is {loss}, eager's {losses['eager']}")
    return seconds


def make_step(shape: LlamaShape, way: Way) -> Callable[[], Tensor]:
    """A contender with a model and an optimizer of its own."""
    torch.manual_seed(0)
    model = Llama(shape)
    batch = make_batch(shape, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    match way:
        case "eager":
            return partial(_separate, model, optimizer, batch)
        case "torch.compile":
            return partial(_separate, torch.compile(model), optimizer, batch)
        case "aotdist.compile":
            return partial(_separate, aotdist.compile(model, backend="inductor"), optimizer, batch)
        case "aotdist.train_step":
            return partial(aotdist.train_step(model, _loss_of, optimizer, backend="inductor"), *batch)
    assert_never(way)


def _loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return model(tokens, targets)


def _separate(
    model: Callable[..., Tensor], optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> Tensor:
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
