"""Training on forty lengths: what is compiled again, and what is held for it.

A transformer encoder of twelve layers sees batches whose length changes at each step. `all steps` is the time
of one step at each length, compiling included. `held` is by how much the process grows from after the third
length to after the last, with freed memory given back: what each further length costs in memory. Each
contender has a process of its own, with empty caches. `step` is that of the program for all lengths beside
the one for a single length, at that length, by turns.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

import aotdist
from benchmarks import workers
from benchmarks.effort import Case, Effort
from benchmarks.process import status
from benchmarks.timing import Contender, Pace, Series, as_series, take_turns
from benchmarks.verdicts import Target

CASE = "forty lengths"
ONE_LENGTH = "one length"
STATIC, DYNAMIC = "aotdist inductor, one length", "aotdist inductor, all lengths"

CONTENDERS: dict[str, Callable[[nn.Module], object]] = {
    "eager": lambda model: model,
    "torch.compile aot_eager": lambda model: model.compile(backend="aot_eager"),
    "torch.compile": lambda model: model.compile(),
    "aotdist fx, each length": partial(aotdist.compile, backend="fx"),
    "aotdist fx, auto": partial(aotdist.compile, backend="fx", dynamic="auto"),
    "aotdist inductor, auto": partial(aotdist.compile, backend="inductor", dynamic="auto"),
}
"""How each compiles a model in place; `torch.compile` opens sizes that change by itself."""

_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "AOTDIST_CACHE_FOLDER")

TARGETS = (
    Target(
        CASE,
        "held",
        "aotdist fx, auto",
        ("torch.compile aot_eager",),
        limit=1.0,
        prediction=1.0,
        reason="nothing is compiled after the second length, by either",
    ),
    Target(
        CASE,
        "all steps",
        "aotdist fx, auto",
        ("torch.compile aot_eager",),
        limit=1.0,
        prediction=0.6,
        reason="two captures on both sides; one with symbols takes 3.5 times as long",
    ),
    Target(
        CASE,
        "all steps",
        "aotdist inductor, auto",
        ("torch.compile",),
        limit=1.0,
        prediction=0.9,
        reason="the same kernels; a second trace with numbers is little beside them",
    ),
    Target(
        ONE_LENGTH,
        "step",
        DYNAMIC,
        (STATIC,),
        limit=1.05,
        prediction=1.02,
        reason="products, most of the step, are the same; loops whose ends are symbols have a tail",
    ),
)


@dataclass(frozen=True, slots=True)
class Job:
    """What the process of one contender is asked."""

    contender: str
    num_layers: int
    num_lengths: int


@dataclass(frozen=True, slots=True)
class Found:
    """What one contender took: seconds, and MiB."""

    seconds: float
    held: float


class Encoder(nn.Module):
    """Layers in a row. Dynamo runs the library's own `TransformerEncoder`, called by itself, as it is."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(num_layers))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same size as `x`: sequences, positions, 64."""
        return self.layers(x)


def cases(effort: Effort) -> list[Case]:
    """Seconds and MiB by contender."""
    return [Case(CASE, partial(_measure, effort)), Case(ONE_LENGTH, partial(_measure_step, effort))]


def _measure_step(effort: Effort) -> list[Series]:
    pace = Pace(rounds=3) if effort.quick else Pace(rounds=30, calls=3)
    with tempfile.TemporaryDirectory() as caches:
        environment: dict[str, str] = {name: caches for name in _CACHES}
        seconds = workers.call(ONE_LENGTH, time_steps, pace, environment=environment)
    return as_series(seconds, case=ONE_LENGTH, quantity="step", unit="ms")


def time_steps(pace: Pace) -> dict[str, list[float]]:
    """Seconds of a step of the program for one length, and of that for all; runs in a process of its own."""
    batch, contenders = torch.randn(8, 96, 64), list[Contender]()
    for name, lengths in ((STATIC, (96,)), (DYNAMIC, (80, 112, 96))):
        torch.manual_seed(0)
        model = aotdist.compile(Encoder(4), backend="inductor")
        for length in lengths:
            _step(model, torch.randn(8, length, 64))
        contenders.append(Contender(name, partial(_step, model, batch)))
    return take_turns(contenders, pace)


def _step(model: nn.Module, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()
    model.zero_grad()


def _measure(effort: Effort) -> list[Series]:
    found = list[Series]()
    for name in CONTENDERS:
        job = Job(name, 1, 4) if effort.quick else Job(name, 12, 40)
        with tempfile.TemporaryDirectory() as caches:
            environment: dict[str, str] = {name: caches for name in _CACHES}
            took = workers.call(f"{CASE}: {name}", train, job, environment=environment)
        found.append(Series(CASE, name, "all steps", "s", (took.seconds,)))
        found.append(Series(CASE, name, "held", "MiB", (took.held,)))
    return found


def train(job: Job) -> Found:
    """One step at each length; runs in the process of the contender."""
    torch.manual_seed(0)
    model = Encoder(job.num_layers)
    CONTENDERS[job.contender](model)
    warnings.simplefilter("ignore")  # each length compiled by itself is said to be
    seconds = before = 0.0
    for number in range(job.num_lengths):
        batch = torch.randn(2, 8 + 3 * number, 64)
        start = time.perf_counter()
        _step(model, batch)
        seconds += time.perf_counter() - start
        if number == 2:
            before = _held()
    return Found(seconds, max(_held() - before, 0.01))


def _held() -> float:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS")
