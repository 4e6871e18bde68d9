"""Programs of ranks that share parameters: each scenario makes one on every rank, and says what it raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import aotdist
from tests.ranks.cases_agreement import Told, told

Step = Callable[[], object]


class Two(nn.Module):
    """`a`, then `b`; or as it is told."""

    def __init__(self, order: str = "ab", registered: str = "ab", width: int = 8) -> None:
        super().__init__()
        self.a: nn.Linear
        self.b: nn.Linear
        for name in registered:
            self.add_module(name, nn.Linear(width, width))
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) if self.order == "ab" else self.a(self.b(x))


def odd() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def training(model: nn.Module, rows: int = 2, backend: str = "fx", width: int = 8) -> Step:
    aotdist.compile(model, backend=backend)
    return lambda: model(torch.ones(rows, width)).sum().backward()


def sharded(model: nn.Module, *units: str) -> nn.Module:
    for unit in units:
        fully_shard(model.get_submodule(unit))
    return fully_shard(model)


def other_order(*units: str, backend: str = "fx") -> Step:
    return training(sharded(Two("ba" if odd() else "ab"), *units), backend=backend)


def registered_in_another_order() -> Step:
    return training(sharded(Two(registered="ba" if odd() else "ab")))


def a_unit_that_depends_on_the_rank() -> Step:
    return training(sharded(Two(), "b" if odd() else "a"))


def two_models_swapped() -> Step:
    steps = [training(sharded(Two())), training(sharded(Two()))]
    return steps[1 if odd() else 0]


def models_by_name_swapped() -> Step:
    models = {name: sharded(Two()) for name in ("generator", "critic")}
    chosen = "critic" if odd() else "generator"
    generator, critic = models["generator"], models["critic"]

    def run(x: torch.Tensor) -> torch.Tensor:
        return generator(x) if chosen == "generator" else critic(x)

    run = aotdist.compile(run, backend="fx")
    return lambda: run(torch.ones(2, 8)).sum().backward()


def tensor_parallel_in_another_order() -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        "a": ColwiseParallel(output_layouts=Replicate()),
        "b": ColwiseParallel(output_layouts=Replicate()),
    }
    return training(parallelize_module(Two("ba" if odd() else "ab"), mesh, plan))


def another_name() -> Step:
    model = nn.Sequential()
    model.add_module("last" if odd() else "first", nn.Linear(8, 8))
    return training(sharded(model))


def another_placement() -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Linear(8, 8, bias=False)
    placed = [Shard(1 if odd() else 0)]
    model.weight = nn.Parameter(distribute_tensor(torch.ones(8, 8), mesh, placed, src_data_rank=None))
    fn = aotdist.compile(lambda: (model.weight * 2).to_local(), backend="fx")
    return lambda: fn().sum().backward()


def one_weight_after_the_other() -> Step:
    """In one module of one unit: nothing but the use of the weights differs."""

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(8, 8)), nn.Parameter(torch.ones(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, last = (self.b, self.a) if odd() else (self.a, self.b)
            return F.linear(F.linear(x, first), last)

    return training(sharded(Weights()))


def replicas_registered_in_another_order() -> Step:
    model = DistributedDataParallel(Two(registered="ba" if odd() else "ab"))
    return training(model)


DIFFERENT: dict[str, Callable[[], Step]] = {
    "units in another order": partial(other_order, "a", "b"),
    "in another order in one unit": other_order,
    "weights in another order": one_weight_after_the_other,
    "registered in another order": registered_in_another_order,
    "a unit of the rank": a_unit_that_depends_on_the_rank,
    "models swapped": two_models_swapped,
    "models swapped in a function": models_by_name_swapped,
    "tensor parallel in another order": tensor_parallel_in_another_order,
    "another name": another_name,
    "another placement": another_placement,
    "replicas registered in another order": replicas_registered_in_another_order,
}


def different() -> dict[str, Told | None]:
    """What each scenario of `DIFFERENT` raises; no rank may run a collective that its peers do not."""
    return {name: told(make()) for name, make in DIFFERENT.items()}


class Experts(nn.Module):
    """Experts of this rank only, another number on each, behind a layer that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        names = [f"expert{number}" for number in range(3 * dist.get_rank(), 3 * dist.get_rank() + 2 + odd())]
        self.own = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(x)
        for expert in self.own.values():
            x = x + expert(x)
        return x


def uneven_experts() -> Step:
    model = Experts()
    fully_shard(model.shared)
    return training(model)


def uneven_shards() -> Step:
    return training(sharded(Two(width=7), "a"), width=7)


def last_batches() -> Step:
    step, model = None, sharded(Two(), "a")
    for rows in (4, 3 if odd() else 4, 2):
        step = training(model, rows)
        step()
    return step


def tied_and_frozen() -> Step:
    model = Two()
    model.b.weight = model.a.weight
    model.b.bias.requires_grad_(False)
    return training(sharded(model))


def replicas() -> Step:
    return training(DistributedDataParallel(Two()), 3 if odd() else 2)


def two_axes() -> Step:
    """Each pair of ranks shares what it shares; on two ranks one of the axes has one rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = Two()
    parallelize_module(model, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
    fully_shard(model.a, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    rows = 2 + dist.get_rank() // 2  # what pairs along `tp` have in common
    return training(model, rows)


ALIKE: dict[str, Callable[[], Step]] = {
    "uneven experts": uneven_experts,
    "uneven shards": uneven_shards,
    "last batches": last_batches,
    "tied and frozen": tied_and_frozen,
    "replicas": replicas,
    "two axes": two_axes,
}


def different_under_inductor() -> Told | None:
    """The first of `DIFFERENT`, compiled by Inductor."""
    return told(other_order("a", "b", backend="inductor"))


def alike() -> dict[str, Told | None]:
    """What each scenario of `ALIKE` raises."""
    return {name: told(lambda make=make: make()()) for name, make in ALIKE.items()}
