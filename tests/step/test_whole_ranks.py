"""Whole steps of sharded models: model, clipping, optimizer and average in one compiled function."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.ranks.harness import World
from tests.step.test_ranks import Feeding
from tests.step.written import Written, compiled_beside_eager

pytestmark = pytest.mark.ranks


def small() -> nn.Module:
    model = Feeding()
    del model.blocks[1]
    return model


def sharded(model: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in model.blocks:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    return model


def in_bfloat16() -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(small(), mp_policy=policy)


def on_two_axes() -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return sharded(split(small(), mesh["tp"]), mesh["dp"])


def training(make_model: Callable[[], nn.Module], differ: bool, **options: Any) -> Written:
    """Micro-batches, the norm of all gradients, AdamW with two groups, a schedule, an average."""
    model = make_model()
    average = make_model().requires_grad_(False)
    average.load_state_dict(model.state_dict())
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, **options)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=4)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
        losses = []
        for micro in x.chunk(2):
            loss = model(micro).float().square().mean() / 2
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for ours, theirs in zip(average.parameters(), model.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)
        return torch.stack(losses).sum(), norm, schedule.get_last_lr()[0]

    def batch(at: int) -> tuple[Any, ...]:
        seed = 10 * at + (torch.distributed.get_rank() if differ else 0)
        return (torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)),)

    return Written(step, [model, average], [optimizer, schedule], batch=batch)


def whole_steps(makers: list[Callable[[], nn.Module]], differ: bool) -> list[list[str]]:
    """The names of the collectives in each program."""
    found = []
    for make_model in makers:
        compiled = compiled_beside_eager(lambda make=make_model: training(make, differ))
        (graphs,) = compiled.graphs
        targets = [str(node.target) for node in graphs["inference"].graph.nodes]
        found.append([target for target in targets if "_c10d_functional" in target])
    return found


def on_one_axis() -> nn.Module:
    return sharded(small())


def reductions(policies: list[MixedPrecisionPolicy]) -> list[int]:
    """The number of reductions in each program."""
    found = []
    for policy in policies:
        compiled = compiled_beside_eager(lambda policy=policy: reducing_once({"mp_policy": policy}))
        (graphs,) = compiled.graphs
        targets = [str(node.target) for node in graphs["inference"].graph.nodes]
        found.append(sum("reduce_scatter" in target for target in targets))
    return found


def test_fsdp_that_reduces_once(world2: World) -> None:
    """`set_requires_gradient_sync` in the loop over micro-batches; one reduction of each unit."""
    policies = [
        MixedPrecisionPolicy(),
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ]
    for numbers in world2.run(reductions, policies):
        assert numbers == [3, 3]


def summing_over_replicas_once(leaves: bool) -> Written:
    """Two updates of three micro-batches, the last of which sums; a loop before `leaves` something to add."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model: Any = sharded(small(), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        losses = []
        for at, micro in enumerate(x.chunk(6)):
            model.set_requires_all_reduce(at % 3 == 2)
            loss = model(micro).square().mean() / 3
            loss.backward()
            losses.append(loss.detach())
            if at % 3 == 2:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return torch.stack(losses)

    def batch(at: int) -> tuple[torch.Tensor]:
        seed = 10 * at + torch.distributed.get_rank()
        return (torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)),)

    def between(at: int) -> None:
        if leaves:
            model.set_requires_all_reduce(False)
            model(*batch(100 + at)).square().mean().backward()
            model.set_requires_all_reduce(True)

    return Written(step, [model], [optimizer], batch=batch, between=between)


def sums_over_replicas(leaves: bool) -> int:
    """How often a step sums over replicas."""
    (graphs,) = compiled_beside_eager(lambda: summing_over_replicas_once(leaves)).graphs
    targets = [str(node.target) for node in graphs["inference"].graph.nodes]
    return sum("all_reduce" in target for target in targets)


@pytest.mark.parametrize("leaves", [False, True])
def test_replicas_that_sum_once(leaves: bool, world2: World) -> None:
    """`set_requires_all_reduce` in the loop over micro-batches; each update sums each of two units once."""
    assert world2.run(sums_over_replicas, leaves) == [4, 4]


def reducing_at_every_second_call() -> Written:
    """Units are told between calls whether to reduce."""
    model: Any = on_one_axis()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor, updates: bool) -> torch.Tensor:
        loss = model(x).square().mean() / 2
        loss.backward()
        if updates:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def batch(at: int) -> tuple[Any, ...]:
        seed = 10 * at + torch.distributed.get_rank()
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)), at % 2 == 1

    model.set_requires_gradient_sync(False)
    return Written(
        step,
        [model],
        [optimizer],
        batch=batch,
        between=lambda at: model.set_requires_gradient_sync(at % 2 == 0),
    )


def accumulation_by_calls() -> int:
    return len(compiled_beside_eager(reducing_at_every_second_call, num_steps=7).graphs)


def test_fsdp_that_reduces_at_every_second_call(world2: World) -> None:
    assert world2.run(accumulation_by_calls) == [2, 2]


def of_parallel_tensors() -> nn.Module:
    return split(small(), init_device_mesh("cpu", (2,)))


def test_fsdp(world2: World) -> None:
    for programs in world2.run(whole_steps, [on_one_axis, in_bfloat16], True):
        for collectives in programs:
            assert any("all_gather" in name for name in collectives)
            assert any("reduce_scatter" in name for name in collectives)
            assert any("all_reduce" in name for name in collectives)  # the norm's


class Skipping(Feeding):
    """Leaves out its second block when told so."""

    def forward(self, x: torch.Tensor, skips: bool = False) -> torch.Tensor:
        for block in self.blocks[: 1 if skips else 2]:
            x = x + block(x)
        return self.head(x)


def reducing_once(options: dict[str, Any]) -> Written:
    """Gradients of micro-batches are added up before they are reduced; the last one leaves out a block."""
    model: Any = sharded(Skipping(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        losses = []
        for at, micro in enumerate(x.chunk(3)):
            model.set_requires_gradient_sync(at == 2)
            loss = model(micro, skips=at > 0).float().square().mean() / 3
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum()

    def batch(at: int) -> tuple[torch.Tensor]:
        seed = 10 * at + torch.distributed.get_rank()
        return (torch.randn(6, 6, generator=torch.Generator().manual_seed(seed)),)

    return Written(step, [model], [optimizer], batch=batch)


def scaled(make_model: Callable[[], nn.Module], differ: bool) -> Written:
    """Gradients of one rank overflow in the third step, or those of all that share a batch."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    def batch(at: int) -> tuple[torch.Tensor]:
        rank = torch.distributed.get_rank() if differ else 0
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * at + rank))
        return (x * float("inf") if at == 2 and rank == 0 else x,)

    return Written(step, [model], [optimizer, scaler], batch=batch)


def scaled_steps(makers: list[tuple[Callable[[], nn.Module], bool]]) -> list[int]:
    return [len(compiled_beside_eager(lambda of=of: scaled(*of)).graphs) for of in makers]


def test_scaler(world2: World) -> None:
    assert world2.run(scaled_steps, [(on_one_axis, True), (of_parallel_tensors, False)]) == [[1, 1]] * 2


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adadelta": {},
    "Adagrad": {},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RMSprop": {"centered": True},
    "Muon": {},
}
"""Those that DTensor has all operators for: not `Adafactor`, `Rprop`, nor what is fused besides Adam's."""


def of_optimizer(name: str, options: dict[str, Any], make_model: Callable[[], nn.Module]) -> Written:
    model = make_model()
    params = [param for param in model.parameters() if name != "Muon" or param.dim() == 2]
    optimizer = getattr(torch.optim, name)(params, lr=0.01, **options)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def batch(at: int) -> tuple[torch.Tensor]:
        return (torch.randn(4, 6, generator=torch.Generator().manual_seed(at)),)

    return Written(step, [model], [optimizer], batch=batch)


def by_optimizer(name: str, options: dict[str, Any], makers: list[Callable[[], nn.Module]]) -> list[int]:
    builds = [functools.partial(of_optimizer, name, options, make_model) for make_model in makers]
    return [len(compiled_beside_eager(build, num_steps=4).graphs) for build in builds]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(world2: World, name: str) -> None:
    found = world2.run(by_optimizer, name, OPTIMIZERS[name], [on_one_axis, of_parallel_tensors])
    assert found == [[1, 1]] * 2


def test_muon_on_two_axes(world4: World) -> None:
    assert world4.run(by_optimizer, "Muon", {}, [on_two_axes]) == [[1]] * 4


def test_tensor_parallel(world2: World) -> None:
    for programs in world2.run(whole_steps, [of_parallel_tensors], False):
        assert all(programs)


def test_two_axes(world4: World) -> None:
    for programs in world4.run(whole_steps, [on_two_axes], False):
        assert all(programs)


def by_ddp() -> str:
    model = DistributedDataParallel(Feeding())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @aotdist.compile(backend="fx")
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    with pytest.raises(UnsupportedProgram) as caught:
        for _ in range(2):
            step(torch.randn(4, 6))
    return str(caught.value)


def test_ddp_is_refused_by_name(world2: World) -> None:
    for said in world2.run(by_ddp):
        assert "DistributedDataParallel" in said


def late_after_the_first_step() -> int:
    """One rank is busy after its first step (it saves a checkpoint), while the other compiles the second."""
    model = on_one_axis()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    @aotdist.compile(backend="fx")
    def step(x: torch.Tensor) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for at in range(3):
        step(torch.ones(4, 6))
        if at == 0 and torch.distributed.get_rank() == 1:
            time.sleep(4)
    return len(step.graphs)


def test_a_rank_that_is_late_after_the_first_step_is_not_lost(world2: World) -> None:
    """That a function turns out to be a step is no failure to compile it."""
    assert world2.run(late_after_the_first_step) == [1, 1]
