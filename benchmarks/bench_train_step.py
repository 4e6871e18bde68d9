"""Whole training step: the Llama with AdamW, a ResNet with SGD, the optimizer apart or in the same graph.

Forward, loss, backward, AdamW (one parameter after the other, PyTorch's default on the CPU) and `zero_grad`.
What can be won is the optimizer's share. On two cores of a Xeon, AdamW takes 15 of 102 ms apart, and 5 in the
graph, where it moves 220 MB at the memory's speed: 0.90 is the least there. On two of a Zen 5 it is 10 of 84
ms and 3: 0.92. Products (52 ms) and attention (14) are the same on both sides. The ResNet's convolutions are
the same, too; an optimizer that has to read their gradients in another order than weights would cost a fifth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, TypeAlias, assert_never, get_args

import torch
from torch import Tensor, nn

import aotdist
from benchmarks import workers
from benchmarks.effort import Case, Effort
from benchmarks.models import Llama, LlamaShape, make_batch
from benchmarks.resnet import ResNet, ResNetShape, make_images
from benchmarks.timing import Contender, Pace, Series, as_series, take_turns
from benchmarks.verdicts import Target

Shape: TypeAlias = LlamaShape | ResNetShape
Way = Literal["eager", "torch.compile", "aotdist.compile", "aotdist.train_step", "@aotdist.compile"]

WAYS: tuple[Way, ...] = get_args(Way)
"""Two in which the optimizer is apart from the compiled model, and two of the whole step in one graph."""
CASE = "single, 1 rank"
RESNET = "ResNet, 1 rank"
QUANTITIES = {CASE: "step with AdamW", RESNET: "step with SGD"}
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
    Target(
        RESNET,
        QUANTITIES[RESNET],
        "aotdist.train_step",
        ("aotdist.compile",),
        limit=1.0,
        prediction=1.0,
        reason="convolutions are the same on both sides, and the optimizer reads gradients as weights lie",
    ),
)


def cases(effort: Effort) -> list[Case]:
    """Milliseconds a step, by contender."""
    pace = Pace(rounds=5, warmup=3) if effort.quick else Pace(rounds=15, warmup=4)
    images = ResNetShape(widths=(8, 16), blocks_per_width=1, image=16) if effort.quick else ResNetShape()
    shapes: dict[str, Shape] = {CASE: effort.shape, RESNET: images}
    return [
        Case(name, partial(_measure, name, shape, pace, effort.environment)) for name, shape in shapes.items()
    ]


def _measure(name: str, shape: Shape, pace: Pace, environment: Mapping[str, str]) -> list[Series]:
    # Each thread keeps its core: else the system puts both on one, now and then, for 8 ms of anyone's step.
    pinned = {**environment, "OMP_PROC_BIND": "true"}
    seconds = workers.call(name, train_in_turns, (shape, pace), environment=pinned)
    return as_series(seconds, case=name, quantity=QUANTITIES[name], unit="ms")


def train_in_turns(job: tuple[Shape, Pace]) -> dict[str, list[float]]:
    """Seconds a step, by contender.

    Raises:
        RuntimeError: after all steps, a contender's loss differs from eager's by more than a thousandth of
            the first one: of a loss that is nearly zero by then, a ResNet's bits are two in a thousand.
    """
    shape, pace = job
    steps = {way: make_step(shape, way) for way in WAYS}
    first = {way: float(step()) for way, step in steps.items()}["eager"]
    seconds = take_turns([Contender(way, run=step) for way, step in steps.items()], pace)
    losses = {way: float(step()) for way, step in steps.items()}
    for way, loss in losses.items():
        if not math.isclose(loss, losses["eager"], rel_tol=0, abs_tol=1e-3 * first):
            raise RuntimeError(f"{way}: the loss is {loss}, eager's {losses['eager']}")
    return seconds


def make_step(shape: Shape, way: Way) -> Callable[[], Tensor]:
    """A contender with a model and an optimizer of its own."""
    torch.manual_seed(0)
    if isinstance(shape, LlamaShape):
        model, batch = Llama(shape), make_batch(shape, seed=0)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        model, batch = ResNet(shape), make_images(shape, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    match way:
        case "eager":
            return partial(_separate, model, optimizer, batch)
        case "torch.compile":
            return partial(_separate, torch.compile(model), optimizer, batch)
        case "aotdist.compile":
            return partial(_separate, aotdist.compile(model, backend="inductor"), optimizer, batch)
        case "aotdist.train_step":
            return partial(aotdist.train_step(model, _loss_of, optimizer, backend="inductor"), *batch)
        case "@aotdist.compile":
            step = partial(_separate, model, optimizer)
            return partial(aotdist.compile(step, backend="inductor"), batch)
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
