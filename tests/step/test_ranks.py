"""Sharded models in a compiled step, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import aotdist
from tests.ranks.harness import World
from tests.step.comparison import Pair, train

pytestmark = pytest.mark.ranks

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "AdamW": ("AdamW", {"lr": 0.01}),
    "AdamW foreach": ("AdamW", {"lr": 0.01, "foreach": True}),
}


class Feeding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)) for _ in range(2)
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def sharded() -> nn.Module:
    model = Feeding()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def split() -> nn.Module:
    model = Feeding()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def of_rank(step: int) -> torch.Tensor:
    seed = 10 * step + torch.distributed.get_rank()
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def of_all(step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step))


def fsdp_case(name: str, options: dict[str, Any], clip: float | None) -> list[str]:
    pair = Pair.of(lambda params: getattr(torch.optim, name)(params, **options), sharded)
    step = train(pair, num_steps=4, clip=clip, data=of_rank)
    return [str(node.target) for node in step.graphs[0]["inference"].graph.nodes]


@pytest.mark.parametrize("clip", [None, 0.1], ids=["whole", "clipped"])
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_fsdp(world2: World, name: str, options: dict[str, Any], clip: float | None) -> None:
    for targets in world2.run(fsdp_case, name, options, clip):
        assert any("all_gather" in target for target in targets)
        assert any("reduce_scatter" in target for target in targets)


def as_written_case() -> int:
    """What follows `backward()` sees the shards, and their gradients, and not what was gathered."""
    pair = Pair.of(lambda params: torch.optim.AdamW(params, lr=0.01), sharded)

    def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], Any]:
        def step(x: torch.Tensor) -> Any:
            model(x).square().mean().backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        return step

    eager, step = map(step_of, pair.models, pair.optimizers)
    compiled: Any = aotdist.compile(step, backend="fx")
    for at in range(3):
        norms = [each(of_rank(at)).full_tensor() for each in (eager, compiled)]
        assert norms[0] > 0.1 and torch.equal(*norms)
    params = zip(*(model.parameters() for model in pair.models), strict=True)
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in params)
    return len(compiled.graphs)


def test_clipping_as_it_is_written(world2: World) -> None:
    assert world2.run(as_written_case) == [1, 1]


def accumulating_case(make_model: Callable[[], nn.Module], clip: float | None) -> list[bool]:
    pair = Pair.of(lambda params: torch.optim.AdamW(params, lr=0.01), make_model)
    step = train(pair, num_steps=6, clip=clip, accumulate=2, data=of_all)
    graphs = [graphs["inference"].graph for graphs in step.graphs]
    return [any(node.target is torch.ops.aten.gelu.default for node in graph.nodes) for graph in graphs]


@pytest.mark.parametrize(("make_model", "clip"), [(sharded, 0.1), (split, None)])
def test_accumulation(world2: World, make_model: Callable[[], nn.Module], clip: float | None) -> None:
    """One graph only adds to gradients, the other updates, too."""
    assert world2.run(accumulating_case, make_model, clip) == [[True, True]] * 2


def tensor_parallel_case(name: str, options: dict[str, Any]) -> None:
    train(Pair.of(lambda params: getattr(torch.optim, name)(params, **options), split), data=of_all)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_tensor_parallel(world2: World, kind: str) -> None:
    world2.run(tensor_parallel_case, *OPTIMIZERS[kind])
