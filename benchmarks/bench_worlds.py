"""Capture on large worlds: of a sharded model, in one process of a group whose others are absent.

What is recorded is one rank's program, whose size does not depend on the number of ranks, so neither should
the seconds. The group is PyTorch's fake one: its collectives return at once, and no rank is asked to agree.
Timed are capture, trace, cut and print of a first step; building the model, sharding it and running what was
compiled are not: what a rank gathers takes the memory that it takes. They are seconds of the processor.

By depth, the model has 70 billion parameters at 80 layers, of which each of 1,024 ranks holds 262 MiB.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from aotdist.capture.captured import UserCall
from aotdist.codegen.fx import FxBackend
from aotdist.pipeline import compilation_of
from aotdist.settings import Settings
from benchmarks import workers
from benchmarks.effort import Case, Effort
from benchmarks.models import Llama, LlamaShape, make_batch, split_matrices
from benchmarks.timing import Contender, Pace, Series, as_series, take_turns
from benchmarks.verdicts import Target

LARGE = (64, 1024)
TP_RANKS = 8

DEPTHS = (8, 80)
SHALLOW, DEEP = (f"{num_layers} layers" for num_layers in DEPTHS)
BY_DEPTH = "FSDP2 on 1,024 ranks, by depth"

_OF_WORLDS = tuple(
    Target(
        f"{spread}, *",
        "capture, CPU",
        f"{num_ranks:,} ranks",
        (f"{smallest} ranks",),
        limit=1.25,
        prediction=1.1,
        reason="the same nodes, but process groups and meshes are looked at in proportion to their ranks",
    )
    for spread, smallest in (("FSDP2", 2), ("FSDP2 and TP", 2 * TP_RANKS))
    for num_ranks in LARGE
)

TARGETS = (
    Target(
        BY_DEPTH,
        "capture, CPU",
        DEEP,
        (SHALLOW,),
        limit=8,
        prediction=6,
        reason="two layers are traced and the others copied, but ten times as many nodes are cut and printed",
    ),
    *_OF_WORLDS,
)


@dataclass(frozen=True, slots=True)
class Job:
    """One way to spread the model.

    Args:
        tensor_parallel: whether matrices are split over 8 ranks as well.
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
    def worlds(self) -> tuple[int, ...]:
        """Numbers of ranks, from the first on for which the program has all of its collectives."""
        return (2 * self.num_tp_ranks, *LARGE)

    @property
    def num_tp_ranks(self) -> int:
        """Over how many a matrix is split."""
        return TP_RANKS if self.tensor_parallel else 1

    @property
    def shape(self) -> LlamaShape:
        """Every parameter has a row for each of 1,024 ranks, so that shards are even in all worlds."""
        return LlamaShape(
            dim=1024, num_layers=self.num_layers, num_heads=TP_RANKS, vocab=1024, sequence=16, batch=1
        )


def cases(effort: Effort) -> list[Case]:
    """Seconds by number of ranks; a case a way to spread the model. `work` is the number of layers."""
    num_layers, rounds = (1, 2) if effort.quick else (2, 5)
    jobs = [Job(tensor_parallel, num_layers, rounds) for tensor_parallel in (False, True)]
    depths = (2, 4) if effort.quick else DEPTHS
    return [
        *(Case(job.case, partial(_measure, job)) for job in jobs),
        Case(BY_DEPTH, partial(_by_depth, depths)),
    ]


def _measure(job: Job) -> list[Series]:
    seconds = workers.call(job.case, captures, job)
    return as_series(seconds, case=job.case, quantity="capture, CPU", unit="s", work=job.num_layers)


def captures(job: Job) -> dict[str, list[float]]:
    """Seconds of a capture, by the number of ranks that there would be."""
    worlds = [_World(job, num_ranks) for num_ranks in job.worlds]
    contenders = [Contender(f"{world.num_ranks:,} ranks", world.capture, world.prepare) for world in worlds]
    return take_turns(contenders, Pace(rounds=job.rounds, warmup=1), clock=time.process_time)


class _World:
    def __init__(self, job: Job, num_ranks: int) -> None:
        self.job = job
        self.num_ranks = num_ranks
        self.model: nn.Module = nn.Identity()

    def prepare(self) -> None:
        """Another group, and in it a model that was never called."""
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=0, world_size=self.num_ranks)
        self.model = _spread(self.job, self.num_ranks)

    def capture(self) -> None:
        call = UserCall(self.model, self.model, make_batch(self.job.shape, seed=0), {})
        compilation_of(call, FxBackend(), Settings())


def _spread(job: Job, num_ranks: int) -> Llama:
    tp = job.num_tp_ranks
    mesh: DeviceMesh = init_device_mesh("cpu", (num_ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    model = Llama(job.shape)
    if tp > 1:
        split_matrices(model, mesh["tp"])
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"])
    return model


def _by_depth(depths: tuple[int, ...]) -> list[Series]:
    seconds, mebibytes = workers.call(BY_DEPTH, captures_by_depth, depths)
    return [
        *as_series(seconds, case=BY_DEPTH, quantity="capture, CPU", unit="s"),
        *(
            Series(BY_DEPTH, depth, "resident memory", "MiB", tuple(samples))
            for depth, samples in mebibytes.items()
        ),
    ]


def captures_by_depth(depths: tuple[int, ...]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of a capture, and the most memory that the process has held by then, in MiB, by depth."""
    dist.init_process_group("fake", rank=0, world_size=LARGE[-1])
    seconds, mebibytes = dict[str, list[float]](), dict[str, list[float]]()
    _seconds_of_capture(1)  # what is loaded on demand is loaded by then
    for num_layers in depths:
        label = f"{num_layers} layers"
        seconds[label] = [_seconds_of_capture(num_layers) for _ in range(3)]
        mebibytes[label] = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]
    return seconds, mebibytes


def _seconds_of_capture(num_layers: int) -> float:
    shape = LlamaShape(dim=8192, num_layers=num_layers, num_heads=64, vocab=32768, sequence=4096, batch=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = Llama(shape)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device="cpu")
    call, start = UserCall(model, model, make_batch(shape, seed=0), {}), time.process_time()
    compilation_of(call, FxBackend(), Settings(partition="min_cut"))
    return time.process_time() - start
