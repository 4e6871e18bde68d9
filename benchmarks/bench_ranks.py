"""What it costs that ranks compare each run of a program that communicates (`Settings.check_ranks`).

A step of the sharded Llama has two such runs, forward and backward. A comparison by itself stands beside the
means that there are for it: a collective of 16 bytes in the group of the program, and a wait in the store for
a key that the peer sets, which leaves keys to be taken down. The store also serves ranks whose groups are
NCCL's, where reading what a collective brought would wait for the GPU; and a rank that waits there hears of
others that will not come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

import aotdist
from aotdist.passes.collectives import Collective
from aotdist.runtime.ranks import board_of_this_process
from aotdist.runtime.ranks.runs import run_check
from aotdist.settings import Settings
from aotdist.torch_seam.groups import world_group_name
from benchmarks import workers
from benchmarks.effort import Case, Effort
from benchmarks.models import LlamaShape, make_batch
from benchmarks.timing import Contender, Pace, Series, as_series, take_turns
from benchmarks.variants import TrainStep, make_model
from benchmarks.verdicts import Target

STEPS, COMPARISONS = "fsdp2, 2 ranks, fx", "2 ranks"

TARGETS = (
    Target(
        STEPS,
        "step",
        "every",
        ("first",),
        limit=1.01,
        prediction=1.001,
        reason="two comparisons of 0.16 ms in a step of 340 ms",
    ),
)


@dataclass(frozen=True, slots=True)
class Job:
    """What the workers are asked."""

    shape: LlamaShape
    pace: Pace


def cases(effort: Effort) -> list[Case]:
    """Milliseconds a step by setting, and microseconds a comparison by means."""
    pace = Pace(rounds=5, warmup=2) if effort.quick else Pace(rounds=20, warmup=4)
    many = Pace(rounds=5 if effort.quick else 50, calls=20, warmup=20)
    environment = effort.environment
    return [
        Case(STEPS, partial(_measure_steps, Job(effort.shape, pace), environment)),
        Case(COMPARISONS, partial(_measure_comparisons, Job(effort.shape, many), environment)),
    ]


def _measure_steps(job: Job, environment: Mapping[str, str]) -> list[Series]:
    seconds = workers.call(STEPS, steps, job, num_ranks=2, environment=environment)
    return as_series(seconds, case=STEPS, quantity="step", unit="ms")


def _measure_comparisons(job: Job, environment: Mapping[str, str]) -> list[Series]:
    seconds = workers.call(COMPARISONS, comparisons, job, num_ranks=2, environment=environment)
    return as_series(seconds, case=COMPARISONS, quantity="comparison", unit="us")


def steps(job: Job) -> dict[str, list[float]]:
    """Seconds a step by setting; runs on every rank."""
    batch, contenders = make_batch(job.shape, seed=dist.get_rank()), list[Contender]()
    for setting in ("first", "steps:100", "every"):
        model = make_model("fsdp2", job.shape)
        step = TrainStep(aotdist.compile(model, backend="fx", settings={"check_ranks": setting}), batch)
        contenders.append(Contender(setting, run=step, prepare=step.clear))
    return take_turns(contenders, job.pace, together=True)


def comparisons(job: Job) -> dict[str, list[float]]:
    """Seconds a comparison by means; runs on every rank."""
    ways = {
        "aotdist: a record in the store": _record(),
        "all_gather": _all_gather(),
        "waiting for a key in the store": _key(),
    }
    return take_turns([Contender(name, run=way) for name, way in ways.items()], job.pace, together=True)


def _record() -> Callable[[], object]:
    found = Collective("all_reduce", world_group_name() or "", 2, "sum", "float32", 8, 32, None, "n", None)
    check = run_check(board_of_this_process(), "step", "forward", [found], [found], Settings())
    assert check is not None, "there are two ranks"
    return check.before_run


def _all_gather() -> Callable[[], object]:
    mine, name = torch.zeros(2, dtype=torch.int64), world_group_name()
    c10d = torch.ops._c10d_functional
    return lambda: c10d.wait_tensor(c10d.all_gather_into_tensor(mine, 2, name)).tolist()


def _key() -> Callable[[], object]:
    board, numbers = board_of_this_process(), itertools.count()
    assert board is not None, "there are two ranks"
    store, rank = board.store, board.rank

    def compare() -> object:
        number = next(numbers)
        store.set(f"{number}/{rank}", "0123456789abcdef")
        found = store.get(f"{number}/{1 - rank}")
        store.delete_key(f"{number - 2}/{rank}")
        return found

    return compare
