"""Training step: forward, loss and backward of the Llama, each layout compiled in each way.

All contenders of a layout live in the same processes, each with its own copy of the model, and are
stepped in rotation. No contender runs an optimizer; gradients are dropped between steps, untimed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks import workers
from benchmarks.effort import Case, Effort
from benchmarks.models import LlamaShape
from benchmarks.timing import Contender, Pace, Series, as_series, take_turns
from benchmarks.variants import (
    LAYOUTS,
    NUM_RANKS,
    Compiler,
    Layout,
    TrainStep,
    case_name,
    compilers_of,
    make_step,
)
from benchmarks.verdicts import Target

FSDP2_PEERS = ("eager", "torch.compile blocks", "torch.compile")

TARGETS = (
    Target(case_name("single"), "step", "aotdist inductor", ("torch.compile",), 1.0, 1.0),
    Target(
        case_name("fsdp2"),
        "step",
        "aotdist fx",
        FSDP2_PEERS,
        limit=0.95,
        prediction=0.89,
        reason="one joint graph with bucketed collectives took 405 ms where FSDP2 eager took 456",
    ),
    Target(
        case_name("fsdp2"),
        "step",
        "aotdist inductor",
        FSDP2_PEERS,
        limit=0.85,
        prediction=0.82,
        reason="the same graph through Inductor took 376 ms of 456",
    ),
    Target(case_name("tp"), "step", "aotdist inductor", ("torch.compile",), 1.0, 1.0),
    Target(case_name("ddp"), "step", "aotdist inductor", ("torch.compile",), 1.0, 1.0),
)


@dataclass(frozen=True, slots=True)
class Job:
    """What the workers of one layout are asked."""

    layout: Layout
    shape: LlamaShape
    pace: Pace


def cases(effort: Effort) -> list[Case]:
    """Milliseconds a step, by contender; a case a layout."""
    pace = Pace(rounds=5, warmup=2) if effort.quick else Pace(rounds=20, warmup=4)
    jobs = [Job(layout, effort.shape, pace) for layout in (LAYOUTS[:2] if effort.quick else LAYOUTS)]
    return [Case(case_name(job.layout), partial(_measure, job, effort.environment)) for job in jobs]


def _measure(job: Job, environment: Mapping[str, str]) -> list[Series]:
    case, num_ranks = case_name(job.layout), NUM_RANKS[job.layout]
    seconds = workers.call(case, step_layout, job, num_ranks=num_ranks, environment=environment)
    return as_series(seconds, case=case, quantity="step", unit="ms")


def step_layout(job: Job) -> dict[str, list[float]]:
    """Seconds a step of one layout; runs on every rank."""
    steps: dict[Compiler, TrainStep] = {
        compiler: make_step(job.layout, job.shape, compiler) for compiler in compilers_of(job.layout)
    }
    check_agreement(steps)
    contenders = [Contender(compiler, run=step, prepare=step.clear) for compiler, step in steps.items()]
    return take_turns(contenders, job.pace, together=NUM_RANKS[job.layout] > 1)


def check_agreement(steps: dict[Compiler, TrainStep]) -> None:
    """Make sure that all contenders compute the same thing before their times are compared.

    Raises:
        RuntimeError: a contender's loss or gradient norm differs from eager's by more than 1e-4.
    """
    outcomes = {compiler: step.outcome() for compiler, step in steps.items()}
    expected = outcomes["eager"]
    for compiler, found in outcomes.items():
        if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(found, expected, strict=True)):
            raise RuntimeError(f"{compiler}: loss and gradient norm are {found}, eager's {expected}")
