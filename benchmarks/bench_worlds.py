"""Capture on large worlds: a sharded model's first step, in one process of a group whose others are absent.

What is recorded is one rank's program, whose size does not depend on the number of ranks, so neither should
the seconds. The group is PyTorch's fake one: its collectives return at once, and no rank is asked to agree.
Timed are a first forward and backward, capture, cut and run; building the model and sharding it are not. They
are seconds of the processor: nothing in them waits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import aotdist
from benchmarks import workers
from benchmarks.effort import Case, Effort
from benchmarks.models import Llama, LlamaShape, make_batch, split_matrices
from benchmarks.timing import Contender, Pace, Series, as_series, take_turns
from benchmarks.verdicts import Target

WORLDS = (2, 64, 1024)
MOST_TP_RANKS = 8

TARGETS = tuple(
    Target(
        "*",
        "first step, CPU",
        f"{num_ranks:,} ranks",
        ("2 ranks",),
        limit=1.25,
        prediction=1.1,
        reason="the same nodes, but process groups and meshes are looked at in proportion to their ranks",
    )
    for num_ranks in WORLDS[1:]
)


@dataclass(frozen=True, slots=True)
class Job:
    """One way to spread the model.

    Args:
        tensor_parallel: whether matrices are split over 8 ranks, where there are that many.
        num_layers: of the model.
        rounds: turns that each world gets.
    """

    tensor_parallel: bool
    num_layers: int
    rounds: int

    @property
    def case(self) -> str:
        """As the tables name it."""
        spread = "FSDP2 and TP" if self.tensor_parallel else "FSDP2"
        return f"{spread}, {self.num_layers} layers"

    @property
    def shape(self) -> LlamaShape:
        """Every parameter has a row for each of 1,024 ranks, so that shards are even in all worlds."""
        return LlamaShape(
            dim=1024, num_layers=self.num_layers, num_heads=MOST_TP_RANKS, vocab=1024, sequence=16, batch=1
        )


def cases(effort: Effort) -> list[Case]:
    """Seconds by number of ranks; a case a way to spread the model. `work` is the number of layers."""
    num_layers, rounds = (1, 2) if effort.quick else (2, 5)
    jobs = [Job(tensor_parallel, num_layers, rounds) for tensor_parallel in (False, True)]
    return [Case(job.case, partial(_measure, job)) for job in jobs]


def _measure(job: Job) -> list[Series]:
    seconds = workers.call(job.case, first_steps, job)
    return as_series(seconds, case=job.case, quantity="first step, CPU", unit="s", work=job.num_layers)


def first_steps(job: Job) -> dict[str, list[float]]:
    """Seconds of a first step, by the number of ranks that there would be."""
    torch.set_flush_denormal(True)  # nobody fills what the fake group gathers: slow numbers may lie there
    steps = [_FirstStep(job, num_ranks) for num_ranks in WORLDS]
    contenders = [Contender(f"{step.num_ranks:,} ranks", step.run, step.prepare) for step in steps]
    return take_turns(contenders, Pace(rounds=job.rounds, warmup=1), clock=time.process_time)


class _FirstStep:
    def __init__(self, job: Job, num_ranks: int) -> None:
        self.job = job
        self.num_ranks = num_ranks
        self.model: nn.Module = nn.Identity()

    def prepare(self) -> None:
        """Another group, and in it a model that was never called."""
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=self.num_ranks)
        self.model = aotdist.compile(_spread(self.job, self.num_ranks), backend="fx")

    def run(self) -> None:
        self.model(*make_batch(self.job.shape, seed=0)).backward()


def _spread(job: Job, num_ranks: int) -> Llama:
    tp = min(MOST_TP_RANKS, num_ranks) if job.tensor_parallel else 1
    mesh: DeviceMesh = init_device_mesh("cpu", (num_ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    model = Llama(job.shape)
    if tp > 1:
        split_matrices(model, mesh["tp"])
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    return model
