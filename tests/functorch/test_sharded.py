"""Sharded modules through compilers and partitions of one's own: collectives are in the graphs."""

from __future__ import annotations

import copy
from typing import Any

import functorch.compile as theirs
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import aotdist.functorch as ours
from tests.functorch.programs import Compilers, data
from tests.ranks.harness import World

PARTITIONS = {
    "default": ours.default_partition,
    "min_cut": ours.min_cut_rematerialization_partition,
    "their default": theirs.default_partition,
    "their min_cut": theirs.min_cut_rematerialization_partition,
}
each_partition = pytest.mark.parametrize("partition", list(PARTITIONS))
each_entry = pytest.mark.parametrize("entry", ["aot_function", "aot_module"])


def _compiled(module: nn.Module, entry: str, partition: str, compilers: Compilers) -> Any:
    return getattr(ours, entry)(module, **compilers.all(), partition_fn=PARTITIONS[partition])


def _step(call: Any, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The result, and this rank's part of every gradient."""
    out = call(x)
    out.square().sum().backward()
    grads = [param.grad for param in module.parameters()]
    return [out, *(grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads)]


def _num_calls(gm: torch.fx.GraphModule, name: str) -> int:
    return sum(name in str(node.target) for node in gm.graph.nodes)


def _sharded() -> nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    module = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2)))
    for block in module:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def fully_sharded_case(entry: str, partition: str) -> dict[str, int]:
    eager, module, compilers = _sharded(), _sharded(), Compilers()
    call = _compiled(module, entry, partition, compilers)
    x = torch.randn(3, 4)
    call(x)
    assert "backward" in compilers.graphs, "ranks find out together whether they can compile it"
    for found, expected in zip(_step(call, module, x), _step(eager, eager, x), strict=True):
        assert torch.equal(found, expected)
    (forward,), (backward,) = compilers.graphs["forward"], compilers.graphs["backward"]
    return {
        "gathers": _num_calls(forward, "all_gather"),
        "reductions": _num_calls(backward, "reduce_scatter"),
    }


@pytest.mark.ranks
@each_entry
@each_partition
def test_fully_shard(world2: World, entry: str, partition: str):
    """Two layers of two parameters, each gathered in the forward and its gradient reduced in the backward."""
    counts = {"gathers": 4, "reductions": 4}
    assert world2.run(fully_sharded_case, entry, partition) == [counts, counts]


@each_entry
@each_partition
def test_tensor_parallel(mesh: DeviceMesh, entry: str, partition: str):
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    module = copy.deepcopy(plain)
    parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    compilers, x = Compilers(), data(2, 4)
    found = _step(_compiled(module, entry, partition, compilers), module, x)
    for value, expected in zip(found, _step(plain, plain, x), strict=True):
        torch.testing.assert_close(value, expected)
    assert len(compilers.graphs["forward"][0].graph.find_nodes(op="placeholder")) == 5
