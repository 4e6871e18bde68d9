"""Peak memory of the training step, one process group per contender.

Two quantities. `step tensors`: the most bytes of tensors that a step has alive at once beyond the
model itself, gradients included, as PyTorch's CPU allocator reports them. One process
repeats to the byte. Two ranks do not: gloo lets go of a buffer when a collective is done, and 20 steps of one
FSDP2 program had 112 to 127 MiB (the same at two commits 500 apart; eager, which waits for each, 112.85). So
it is the median of several steps that counts.
`process`: the most memory that a process holds over some steps, less what it held before the model
was made; a compiler's own heap is part of it, and so are buffers that no allocator reports.

`whole step` is with AdamW and `zero_grad`, the optimizer apart or in the same graph, where a gradient is gone
as soon as its parameter is updated. Blocks are checkpointed: else a step of equal blocks needs most where its
loss is computed, before there are gradients. Optimizer state is there before.
"""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.report.profile import most_allocated_by
from benchmarks import workers
from benchmarks.effort import Case, Effort
from benchmarks.models import Llama, LlamaShape, make_batch
from benchmarks.process import status
from benchmarks.timing import Series
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


def _targets(layout: Layout) -> tuple[Target, ...]:
    """`fx` saves what eager saves; whatever compiles is held against what compiles."""
    case, limit, prediction = case_name(layout), 1.05, 1.0
    compiled = tuple(name for name in compilers_of(layout) if name.startswith("torch.compile"))
    return (
        Target(
            case, "step tensors", "aotdist fx", ("eager",), limit, prediction, "the same tensors are saved"
        ),
        Target(
            case, "step tensors", "aotdist inductor", compiled, limit, prediction, "min-cut on both sides"
        ),
        Target(case, "process", "aotdist fx", compiled, limit, prediction, "the same libraries are loaded"),
        Target(
            case, "process", "aotdist inductor", compiled, limit, prediction, "the same libraries are loaded"
        ),
    )


NUM_MEASURED = 9
"""Steps whose tensors are measured."""
WHOLE = "whole step, 1 rank"
Way = Literal[
    "eager", "aotdist fx", "aotdist inductor", "aotdist fx, one graph", "aotdist inductor, one graph"
]
WAYS: tuple[Way, ...] = get_args(Way)
TARGETS = (
    *(target for layout in LAYOUTS for target in _targets(layout)),
    *(
        Target(
            WHOLE,
            "step tensors",
            f"aotdist {backend}, one graph",
            (f"aotdist {backend}",),
            limit=0.9,
            prediction=0.8,
            reason="gradients go as they come, and what is saved is the same",
        )
        for backend in ("fx", "inductor")
    ),
)


@dataclass(frozen=True, slots=True)
class Job:
    """What the workers of one contender are asked."""

    layout: Layout
    shape: LlamaShape
    compiler: Compiler
    num_steps: int


@dataclass(frozen=True, slots=True)
class Peak:
    """Units: MiB, of the rank that needs most; `step_tensors` of each of some steps."""

    step_tensors: tuple[float, ...]
    process: float


def cases(effort: Effort) -> list[Case]:
    """MiB by contender; a case a layout."""
    layouts: tuple[Layout, ...] = ("single",) if effort.quick else LAYOUTS
    spread = [Case(case_name(layout), partial(_measure, layout, effort)) for layout in layouts]
    return [*spread, Case(WHOLE, partial(_measure_whole, effort))]


def _measure(layout: Layout, effort: Effort) -> list[Series]:
    case, found = case_name(layout), list[Series]()
    for compiler in compilers_of(layout):
        job = Job(layout, effort.shape, compiler, num_steps=5)
        label, num_ranks = f"{case}: {compiler}", NUM_RANKS[layout]
        peak = workers.call(label, peak_of, job, num_ranks=num_ranks, environment=effort.environment)
        found.append(Series(case, compiler, "step tensors", "MiB", peak.step_tensors))
        found.append(Series(case, compiler, "process", "MiB", (peak.process,)))
    return found


def _measure_whole(effort: Effort) -> list[Series]:
    """Each way in a process of its own: what one compiled is no memory of another."""
    found: list[Series] = []
    for way in WAYS:
        job = (effort.shape, way)
        peak = workers.call(f"{WHOLE}: {way}", peak_of_whole, job, environment=effort.environment)
        found.append(Series(WHOLE, way, "step tensors", "MiB", (peak,)))
    return found


class Checkpointed(nn.Module):
    """A block whose inside is computed again in the backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As the block."""
        return cast("Tensor", checkpoint(self.block, x, cos, sin, use_reentrant=False))


def peak_of_whole(job: tuple[LlamaShape, Way]) -> float:
    """MiB of tensors that a step with AdamW has alive at once, beyond model and state."""
    shape, way = job
    torch.manual_seed(0)
    model, batch = Llama(shape), make_batch(shape, seed=0)
    model.blocks = nn.ModuleList(map(Checkpointed, model.blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    backend = way.removeprefix("aotdist ").removesuffix(", one graph")
    forward = aotdist.compile(model, backend=backend) if way in ("aotdist fx", "aotdist inductor") else model

    def step() -> Tensor:
        loss = forward(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = aotdist.compile(step, backend=backend) if way.endswith("one graph") else step
    for _ in range(3):
        run()
    return most_allocated_by(run)


def peak_of(job: Job) -> Peak:
    """Both quantities of one contender; runs on every rank."""
    resident = status("VmRSS")
    step = make_step(job.layout, job.shape, job.compiler)
    _repeat(step, job.num_steps)
    _forget_high_water()
    _repeat(step, job.num_steps)
    process = status("VmHWM") - resident
    return _hungriest_rank(Peak(tuple(_of_one_step(step) for _ in range(NUM_MEASURED)), process))


def _of_one_step(step: TrainStep) -> float:
    step.clear()
    return most_allocated_by(step)


def _repeat(step: TrainStep, times: int) -> None:
    for _ in range(times):
        step.clear()
        step()


def _forget_high_water() -> None:
    """Start VmHWM again from what is needed now: compiling leaves free pages behind."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _hungriest_rank(peak: Peak) -> Peak:
    if not dist.is_initialized():
        return peak
    everyone = [peak] * dist.get_world_size()
    dist.all_gather_object(everyone, peak)
    hungriest = max((rank.step_tensors for rank in everyone), key=median)
    return Peak(hungriest, max(rank.process for rank in everyone))
