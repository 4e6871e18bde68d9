"""Capture: a function recorded as one joint graph and cut in two, no compiler behind it.

Seconds grow with the number of nodes, not with their sizes, so the model is narrow and its batch is
one short sequence. Both pipelines' first call ends with a run of the forward, which is timed with it:
eager needs 23 ms for it at 8 layers, 91 ms at 64 (2 busy cores).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from functorch import make_fx
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import aotdist
from benchmarks import workers
from benchmarks.effort import Case, Effort
from benchmarks.models import Llama, LlamaShape, make_batch, split_matrices
from benchmarks.timing import Contender, Pace, Series, as_series, take_turns
from benchmarks.verdicts import Target

TARGETS = (
    Target(
        "plain*",
        "capture",
        "aotdist fx",
        ("aot_function, min-cut",),
        limit=0.25,
        prediction=0.055,
        reason="of 64 layers, which took 0.06 before; nodes and fakes of copied blocks take a third less",
    ),
    Target(
        "DTensor*",
        "capture",
        "aotdist fx",
        ("aot_function, min-cut",),
        limit=0.2,
        prediction=0.08,
        reason="of 32 layers, which took 0.085 before; what is saved is the same as without DTensors",
    ),
    Target(
        "written memory*",
        "capture",
        "aotdist fx, shared",
        ("aotdist fx, apart",),
        limit=2.2,
        prediction=2.0,
        reason="one trace finds out that shared memory is written, a second goes through its base",
    ),
)


@dataclass(frozen=True, slots=True)
class Job:
    """One model to capture.

    Args:
        mesh_size: ranks of a fake process group to split the matrices over; 1 for plain parameters.
        shape: sizes of the model.
        rounds: turns that each contender gets.
        writes: whether two more inputs lie on one buffer, and one is written.
    """

    mesh_size: int
    shape: LlamaShape
    rounds: int
    writes: bool = False

    @property
    def case(self) -> str:
        """As the tables name it."""
        if self.writes:
            return f"written memory, {self.shape.num_layers} layers"
        parameters = "plain" if self.mesh_size == 1 else f"DTensor on {self.mesh_size} ranks"
        return f"{parameters}, {self.shape.num_layers} layers"


@dataclass(frozen=True, slots=True)
class Lifted:
    """A module as a function of its parameters, and what to call it with.

    Args:
        fn: `fn(parameters, buffers, tokens, targets)` is the loss.
        parameters: what gradients are for.
        rest: buffers, tokens, targets.
    """

    fn: Callable[..., Tensor]
    parameters: Sequence[nn.Parameter]
    rest: tuple[Sequence[Tensor], Tensor, Tensor]


def cases(effort: Effort) -> list[Case]:
    """Seconds by contender; a case a model. `work` is the number of layers."""
    return [Case(job.case, partial(_measure, job)) for job in _jobs(effort.quick)]


def _measure(job: Job) -> list[Series]:
    seconds = workers.call(job.case, capture_model, job)
    return as_series(seconds, case=job.case, quantity="capture", unit="s", work=job.shape.num_layers)


def _jobs(quick: bool) -> list[Job]:
    """Deep models get fewer rounds: the peer needs 20 s for one of 64 layers."""
    if quick:
        return [*(Job(size, _shape(2), rounds=3) for size in (1, 8)), Job(1, _shape(2), 3, writes=True)]
    plain = [Job(1, _shape(depth), rounds) for depth, rounds in ((4, 5), (8, 5), (16, 3), (32, 1), (64, 1))]
    spread = [Job(size, _shape(depth), rounds) for size in (8, 64) for depth, rounds in ((8, 3), (32, 1))]
    return [*plain, *spread, *(Job(1, _shape(depth), 3, writes=True) for depth in (8, 32))]


def _shape(num_layers: int) -> LlamaShape:
    """64 heads, so that 64 ranks have one each."""
    return LlamaShape(dim=256, num_layers=num_layers, num_heads=64, vocab=256, sequence=16, batch=1)


def capture_model(job: Job) -> dict[str, list[float]]:
    """Seconds a capture, by contender. Caches that outlive a capture (fake tensors', DTensor's) are warm."""
    measure = _with_memory if job.writes else _with_contenders
    measure(lift(Job(job.mesh_size, _shape(1), 1)), Pace(rounds=1, warmup=0))
    return measure(lift(job), Pace(rounds=job.rounds, warmup=0))


def lift(job: Job) -> Lifted:
    """The Llama, its parameters lifted out, split over a fake mesh when the job says so."""
    model = Llama(job.shape)
    if job.mesh_size > 1:
        if not dist.is_initialized():
            dist.init_process_group("fake", rank=0, world_size=job.mesh_size)
        split_matrices(model, init_device_mesh("cpu", (job.mesh_size,)))
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]

    def fn(
        parameters: Sequence[Tensor], buffers: Sequence[Tensor], tokens: Tensor, targets: Tensor
    ) -> Tensor:
        state = dict(zip(names, (*parameters, *buffers), strict=True))
        return functional_call(model, state, (tokens, targets))

    rest = (list(model.buffers()), *make_batch(job.shape, seed=0))
    return Lifted(fn, list(model.parameters()), rest)


def _with_contenders(lifted: Lifted, pace: Pace) -> dict[str, list[float]]:
    contenders = [
        Contender("make_fx, joint trace alone", partial(trace_bare, lifted)),
        Contender("aot_function, min-cut", partial(capture_with_peer, lifted)),
        Contender("aotdist fx", partial(capture_with_ours, lifted)),
    ]
    return take_turns(contenders, pace, pause_gc=False)


def _with_memory(lifted: Lifted, pace: Pace) -> dict[str, list[float]]:
    """The same function with two parts of one buffer, of which it writes one."""

    def fn(written: Tensor, read: Tensor, *args: Any) -> Tensor:
        written.add_(1)
        return lifted.fn(*args) + read.sum()

    def capture(count: int) -> Any:
        memory = torch.zeros(64)
        compiled = aotdist.compile(fn, backend="fx", settings=aotdist.Settings(partition="min_cut"))
        return compiled(memory[:count], memory[32:], lifted.parameters, *lifted.rest)

    contenders = [
        Contender("aotdist fx, apart", partial(capture, 32)),
        Contender("aotdist fx, shared", partial(capture, 40)),
    ]
    return take_turns(contenders, pace, pause_gc=False)


def trace_bare(lifted: Lifted) -> torch.fx.GraphModule:
    """The least that any capture does: one trace of forward and backward over fake tensors.

    No functionalisation, no facts, no partition; DTensors are rebuilt inside from their shards.
    """

    def joint(shards: Sequence[Tensor], *rest: object) -> tuple[Tensor, ...]:
        parameters = [_like(shard, model) for shard, model in zip(shards, lifted.parameters, strict=True)]
        loss = lifted.fn(parameters, *rest)
        return (loss, *(_shard(grad) for grad in torch.autograd.grad(loss, parameters)))

    shards = [_shard(parameter).detach() for parameter in lifted.parameters]
    return make_fx(joint, tracing_mode="fake")(shards, *lifted.rest)


def _shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(shard: Tensor, parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return shard.detach().requires_grad_()
    spread = DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return spread.detach().requires_grad_()


def capture_with_peer(lifted: Lifted) -> Any:
    """`functorch.compile.aot_function` with compilers that return the graph they get."""
    compiled = aot_function(
        lifted.fn, fw_compiler=nop, bw_compiler=nop, partition_fn=min_cut_rematerialization_partition
    )
    return compiled(lifted.parameters, *lifted.rest)


def capture_with_ours(lifted: Lifted) -> Any:
    """Ours, min-cut like the peer's, called once like the peer's."""
    compiled = aotdist.compile(lifted.fn, backend="fx", settings=aotdist.Settings(partition="min_cut"))
    return compiled(lifted.parameters, *lifted.rest)
