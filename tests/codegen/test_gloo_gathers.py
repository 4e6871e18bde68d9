"""Gloo's gathers write into buffers of the graph's own, and many may be in flight."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import aotdist
from aotdist.codegen.rewrites import gathers_into_buffers
from aotdist.program import Graph, Slot
from aotdist.torch_seam.proxies import make_fx
from tests.ranks.harness import World

pytestmark = pytest.mark.ranks
C10D = torch.ops._c10d_functional


def two_gathers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    started = [C10D.all_gather_into_tensor(part, dist.get_world_size(), "0") for part in (x + 1, x * 2)]
    first, second = (C10D.wait_tensor(gather) for gather in started)
    return first, second


def rewritten_case() -> None:
    x = torch.arange(6.0) * (dist.get_rank() + 1)
    gm = make_fx(two_gathers, tracing_mode="fake")(x)
    graph = Graph(gm, (Slot("primal", "x"),), (Slot("output", "out[0]"), Slot("output", "out[1]")))
    before = gm.code
    safe = gathers_into_buffers(graph)
    assert gm.code == before and gathers_into_buffers(safe) is safe
    assert "all_gather_into_tensor.default" not in safe.gm.code
    for ours, expected in zip(safe.gm(x), two_gathers(x), strict=True):
        assert torch.equal(ours, expected)


def test_the_graph_that_compilers_get(world2: World) -> None:
    world2.run(rewritten_case)


def in_flight_case() -> None:
    """PyTorch's own operator aborts within some thousand rounds of this."""
    compiled = aotdist.compile(two_gathers, backend="fx")
    x = torch.full((33,), float(dist.get_rank()))
    expected = [
        torch.tensor([0.0, 1.0]).repeat_interleave(33) + 1,
        torch.tensor([0.0, 2.0]).repeat_interleave(33),
    ]
    for _ in range(4000):
        results = compiled(x)
    assert all(torch.equal(ours, value) for ours, value in zip(results, expected, strict=True))


@pytest.mark.sweep
def test_two_in_flight(world2: World) -> None:
    world2.run(in_flight_case)


def repeated_case() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1))
    for part in (model[0], model[1], model[3], model):
        fully_shard(part)
    batch = torch.randn(8, 6)
    aotdist.compile(model, backend="inductor")

    def step() -> list[torch.Tensor]:
        loss = model(batch).square().mean()
        loss.backward()
        grads = [parameter.grad.to_local() for parameter in model.parameters()]
        model.zero_grad()
        return [loss.detach(), *grads]

    first = step()
    for _ in range(200):
        assert all(map(torch.equal, step(), first))


@pytest.mark.usefixtures("inductor_cache")
def test_inductor_writes_nothing_that_a_gather_reads(world2: World) -> None:
    """It reuses memory; without another use behind the wait, a step in twenty had other numbers."""
    world2.run(repeated_case)


def as_many_as_are_chosen(x: torch.Tensor) -> torch.Tensor:
    chosen = x[x[:, 0] > 0]
    return C10D.wait_tensor(C10D.all_gather_into_tensor(chosen, dist.get_world_size(), "0"))


def of_data_case() -> None:
    """Equal numbers on all ranks, as a router that is the same everywhere has them."""
    compiled = aotdist.compile(as_many_as_are_chosen, backend="fx")
    for count in (2, 3, 1):
        x = torch.full((4, 3), float(dist.get_rank() + 1))
        x[count:] = -1
        assert torch.equal(compiled(x), as_many_as_are_chosen(x))
    assert len(compiled.graphs) == 1


def test_how_many_rows_depends_on_data(world2: World) -> None:
    world2.run(of_data_case)
