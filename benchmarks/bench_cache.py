"""The compile cache: the first step of a process that compiles, and of one that finds what another compiled.

Cold: the folder of the cache is empty, and so is that of Inductor's kernels. Warm: a fresh process with the
same model and an empty folder for Inductor, which has to do without it. Importing torch and building the
model are not timed, loading a compiler is. `fx` has nothing to keep: its trace takes nearly all of the time,
and every process traces. CPU seconds are those of the process and of the compilers that it starts; those of
code generation are the ranks' in `prepare_joint`, `emit` and what both start. A rank by itself has no cache,
and a folder of its own for Inductor.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Literal
from unittest.mock import patch

import torch.distributed as dist

from aotdist.codegen.contract import Emission, Emitted
from aotdist.codegen.inductor import InductorBackend
from aotdist.program import Graph
from benchmarks import workers
from benchmarks.effort import Case, Effort
from benchmarks.models import LlamaShape
from benchmarks.timing import Series, as_series
from benchmarks.variants import NUM_RANKS, Compiler, Layout, case_name, make_step
from benchmarks.verdicts import Target

Temperature = Literal["cold", "warm"]
_INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
TEMPERATURES: tuple[Temperature, ...] = ("cold", "warm")
COMPILERS: tuple[Compiler, ...] = ("aotdist inductor", "aotdist fx")
ALL, ONE = "all ranks, one cache", "a rank by itself"

TARGETS = (
    Target(
        case_name("single"),
        "first step",
        "aotdist inductor, warm",
        ("aotdist inductor, cold",),
        0.25,
        0.24,
        "3.1 of 12.8 s on one core: 1.1 to import PyTorch's compilers, 1.3 for the trace, 0.2 for the step",
    ),
    Target(
        case_name("single"),
        "first step, CPU",
        "aotdist inductor, warm",
        ("aotdist inductor, cold",),
        0.25,
        0.17,
        "the same 3.1 s, of 17.1 s with those of g++",
    ),
    Target(
        case_name("fsdp2"),
        "code generation, CPU",
        ALL,
        (ONE,),
        1.05,
        1.0,
        "both ranks have the same graphs: what one compiles, the other waits for",
    ),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One first step."""

    layout: Layout
    shape: LlamaShape
    compiler: Compiler
    shares: bool = True
    """Whether what a rank generates is there for the others."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one first step.

    Args:
        wall: of the slowest rank.
        cpu: of all ranks, and of the compilers that they started.
        generating: of each rank, in code generation.
    """

    wall: float
    cpu: float
    generating: tuple[float, ...]


def cases(effort: Effort) -> list[Case]:
    """Seconds of the first step; and who of several ranks generates code."""
    rounds = 1 if effort.quick else 2
    alone = Case(case_name("single"), partial(_alone, effort.shape, rounds))
    ranks = Case(case_name("fsdp2"), partial(_ranks, effort.shape, rounds))
    return [alone] if effort.quick else [alone, ranks]


def _alone(shape: LlamaShape, rounds: int) -> list[Series]:
    spent = [
        (f"{compiler}, {temperature}", once)
        for _ in range(rounds)
        for compiler in COMPILERS
        for temperature, once in _cold_and_warm(Job("single", shape, compiler)).items()
    ]
    quantities: dict[str, Callable[[Spent], float]] = {
        "first step": lambda once: once.wall,
        "first step, CPU": lambda once: once.cpu,
    }
    found: list[Series] = []
    for quantity, of in quantities.items():
        seconds: dict[str, list[float]] = {}
        for name, once in spent:
            seconds.setdefault(name, []).append(of(once))
        found += as_series(seconds, case=case_name("single"), quantity=quantity, unit="s")
    return found


def _ranks(shape: LlamaShape, rounds: int) -> list[Series]:
    job = Job("fsdp2", shape, "aotdist inductor")
    seconds: dict[str, list[float]] = {ALL: [], ONE: []}
    for _ in range(rounds):
        seconds[ALL].append(sum(_cold(job).generating))
        seconds[ONE].append(mean(_cold(replace(job, shares=False)).generating))
    return as_series(seconds, case=case_name("fsdp2"), quantity="code generation, CPU", unit="s")


def _cold(job: Job) -> Spent:
    with tempfile.TemporaryDirectory() as cache:
        return _first_step_in(cache, "cold", job)


def _cold_and_warm(job: Job) -> dict[Temperature, Spent]:
    with tempfile.TemporaryDirectory() as cache:
        return {temperature: _first_step_in(cache, temperature, job) for temperature in TEMPERATURES}


def _first_step_in(cache: str, temperature: Temperature, job: Job) -> Spent:
    label = f"{case_name(job.layout)}: {job.compiler}, {temperature}"
    environment = {"AOTDIST_CACHE_FOLDER": cache, _INDUCTOR_FOLDER: str(Path(cache, temperature))}
    if not job.shares:
        label, environment = f"{label}, no cache", {**environment, "AOTDIST_CACHE_BYTES": "0"}
    return workers.call(label, first_step, job, num_ranks=NUM_RANKS[job.layout], environment=environment)


def first_step(job: Job) -> Spent:
    """What compiling takes, and the step that makes it happen. Runs on every rank."""
    step = make_step(job.layout, job.shape, job.compiler)
    together = NUM_RANKS[job.layout] > 1
    if not job.shares:
        os.environ[_INDUCTOR_FOLDER] += f"-rank{dist.get_rank()}"
    if together:
        dist.barrier()
    with _Generation() as generation:
        wall, own, children = time.perf_counter(), time.process_time(), _of_children()
        step()
        wall, own = time.perf_counter() - wall, time.process_time() - own
        children = _of_children() - children
    mine = Spent(wall, own + children, (generation.seconds + children,))
    if not together:
        return mine
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return Spent(
        wall=max(each.wall for each in everyone),
        cpu=sum(each.cpu for each in everyone),
        generating=tuple(seconds for each in everyone for seconds in each.generating),
    )


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class _Generation(ExitStack):
    """Counts this process's CPU seconds in Inductor, children apart."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        prepare, emit = InductorBackend.prepare_joint, InductorBackend.emit

        def prepare_joint(backend: InductorBackend, graph: Graph) -> Graph:
            return self._counted(prepare, backend, graph)

        def emitted(backend: InductorBackend, graph: Graph, emission: Emission) -> Emitted:
            found = self._counted(emit, backend, graph, emission)
            return replace(found, finish=partial(self._counted, found.finish))

        self.enter_context(patch.object(InductorBackend, "prepare_joint", prepare_joint))
        self.enter_context(patch.object(InductorBackend, "emit", emitted))

    def _counted(self, run: Callable[..., Any], *args: Any) -> Any:
        start = time.process_time()
        try:
            return run(*args)
        finally:
            self.seconds += time.process_time() - start
