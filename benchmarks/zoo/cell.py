"""One cell of the table: a model in one layout and one precision, eager and compiled side by side.

Runs on every rank. All contenders start from the same weights, see the same batches and draw the same random
numbers; after each step, loss, gradients, parameters and buffers are held against eager's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import aotdist
from aotdist.report.profile import most_allocated_by
from benchmarks.timing import Contender, Pace, take_turns
from benchmarks.zoo.families import Size, make, make_batch
from benchmarks.zoo.layouts import mesh_of, spread
from benchmarks.zoo.precisions import convert, dtype_of
from benchmarks.zoo.vocabulary import Compiler, Family, Found, Kernels, Layout, Outcome, Precision

_OURS: Mapping[Kernels, Any] = {"operators": {"backend": "fx"}, "inductor": {"backend": "auto"}}
# Inductor is told to draw eager's random numbers, as aotdist has it do of itself.
_THEIRS: Mapping[Kernels, Any] = {
    "operators": {"backend": "aot_eager"},
    "inductor": {"options": {"fallback_random": True}},
}
_LONGEST = 240  # characters of a message


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks of one cell are asked.

    Args:
        kernels: what compilers run: operators as captured, or what Inductor makes of them.
        family: which model.
        layout: how it is spread.
        precision: what it computes in.
        compilers: who takes part; eager is the first.
        size: of model and batch.
        num_steps: training steps that are compared.
        pace: of the steps that are timed.
    """

    kernels: Kernels
    family: Family
    layout: Layout
    precision: Precision
    compilers: tuple[Compiler, ...]
    size: Size
    num_steps: int
    pace: Pace


class Training:
    """A contender's model, and how it is trained."""

    def __init__(self, job: Job, mesh: DeviceMesh, compiler: Compiler) -> None:
        self._job, self._mesh, self.compiler = job, mesh, compiler
        self.plain = make(job.family, job.size)
        self.num_converted = convert(self.plain, job.precision)
        self.num_linear = sum(isinstance(module, nn.Linear) for module in self.plain.modules())
        spread(self.plain, job.layout, mesh, dtype_of(job.precision))
        # One tensor after the other: lists may not hold DTensors beside plain tensors.
        self._optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.1, foreach=False)
        self._model: Any = self.plain
        if compiler == "aotdist":
            self._model = aotdist.compile(self.plain, **_OURS[job.kernels])
        elif compiler == "torch.compile":
            self._model = torch.compile(self.plain, dynamic=False, **_THEIRS[job.kernels])

    def clear(self) -> None:
        for parameter in self.plain.parameters():
            parameter.grad = None

    def step(self, number: int = 0) -> Tensor:
        """Forward and backward on a batch of this rank's; the loss."""
        job = self._job
        batch = make_batch(job.family, job.size, seed=100 * number + self._mesh.get_local_rank("dp"))
        torch.manual_seed(number)
        loss: Tensor = self._model(**batch).loss
        loss.backward()
        return loss.detach()

    def train(self, number: int) -> dict[str, Tensor]:
        """A whole step; what it computed and left behind, by name."""
        self.clear()
        seen = {"loss": self.step(number)}
        for name, parameter in self.plain.named_parameters():
            if parameter.grad is not None:
                seen[f"{name}.grad"] = parameter.grad
        self._optimizer.step()
        tensors = (*self.plain.named_parameters(), *self.plain.named_buffers())
        return {name: _local(tensor) for name, tensor in (*seen.items(), *tensors)}

    def num_graphs(self) -> int:
        """How many graphs the forward became."""
        if self.compiler == "aotdist":
            return len(self._model.graphs)
        return _dynamo_graphs() if self.compiler == "torch.compile" else 0


def _dynamo_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _local(tensor: Tensor) -> Tensor:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # pyright: ignore[reportPrivateUsage]
    return local.detach().clone()


def fill(job: Job) -> Found:
    """The cell; runs on every rank, and comes back from the first.

    Contenders come one after the other: what `torch.compile` leaves behind when it fails can make eager fail
    after it (torch 2.13: a fake tensor in the mask of a sharded embedding, which all models of a process
    share). One that raises does so on all ranks, or the cell comes to no end.
    """
    mesh = mesh_of(job.layout)
    outcomes: dict[Compiler, Outcome] = {}
    eager: Training | None = None
    expected: list[dict[str, Tensor]] = []
    for compiler in job.compilers:
        outcomes[compiler] = outcome = Outcome()
        try:
            training = Training(job, mesh, compiler)
            steps = [training.train(number) for number in range(job.num_steps)]
            eager, expected = eager or training, expected or steps
            outcome.differs, outcome.where = difference(expected, steps)
            outcome.loss_differs = max(
                _apart(a["loss"], b["loss"]) for a, b in zip(expected, steps, strict=True)
            )
            outcome.num_graphs = training.num_graphs()
            _measure(job, eager, training, outcome)
        except Exception as error:
            outcome.failure = in_a_line(error)
        if eager is None:
            break
    layers = (0, 0) if eager is None else (eager.num_converted, eager.num_linear)
    return Found(*layers, _worst_of_all_ranks(outcomes))


def in_a_line(error: BaseException) -> str:
    """The class of an error and the first sentence of what it says."""
    text = " ".join(str(error).split())
    sentence = text.split(". ")[0]
    return f"{type(error).__name__}: {sentence[:_LONGEST]}{'...' * (len(sentence) > _LONGEST)}"


def difference(expected: list[dict[str, Tensor]], steps: list[dict[str, Tensor]]) -> tuple[float, str]:
    """The largest relative difference, and of what; 0.0 only if all bits are equal."""
    worst, where = 0.0, ""
    for number, (eager, ours) in enumerate(zip(expected, steps, strict=True)):
        for name in eager.keys() | ours.keys():
            apart = _apart(eager.get(name), ours.get(name))
            if apart > worst:
                worst, where = apart, f"{name}, step {number}"
    return worst, where


def _apart(a: Tensor | None, b: Tensor | None) -> float:
    """By how much of its norm `a` is not `b`."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if _bits(a) == _bits(b):
        return 0.0
    wide_a, wide_b = a.double(), b.double()
    tiny = torch.finfo(a.dtype if a.is_floating_point() else wide_a.dtype).tiny
    apart = float((wide_a - wide_b).norm() / wide_a.norm().clamp_min(tiny))
    return math.inf if math.isnan(apart) else apart or math.ulp(0.0)


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _measure(job: Job, eager: Training, training: Training, outcome: Outcome) -> None:
    """Time a contender in turn with eager, and look at its memory."""
    ours, theirs = (
        Contender("ours", training.step, training.clear),
        Contender("eager", eager.step, eager.clear),
    )
    samples = take_turns([theirs, ours], job.pace, together=True)
    outcome.seconds, outcome.eager_seconds = tuple(samples["ours"]), tuple(samples["eager"])
    training.clear()
    outcome.peak = most_allocated_by(training.step)
    training.clear()
    eager.clear()


def _worst_of_all_ranks(outcomes: dict[Compiler, Outcome]) -> dict[Compiler, Outcome]:
    everyone = [outcomes] * dist.get_world_size()
    dist.all_gather_object(everyone, outcomes)
    return {name: _worst([rank[name] for rank in everyone]) for name in outcomes}


def _worst(ranks: list[Outcome]) -> Outcome:
    furthest = max(ranks, key=lambda outcome: outcome.differs)
    failure = next((outcome.failure for outcome in ranks if outcome.failure), "")
    return replace(
        furthest,
        failure=failure,
        loss_differs=max(outcome.loss_differs for outcome in ranks),
        peak=max(outcome.peak for outcome in ranks),
    )
