"""Models on two ranks behind Dynamo: FSDP2, whose hooks break its graph, and DTensors as inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import aotdist
from aotdist.dynamo import regions
from tests.dynamo.comparison import compiled
from tests.ranks.harness import World

pytestmark = pytest.mark.ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x):
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.25)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded() -> nn.Module:
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def split() -> nn.Module:
    model, mesh = Net(), init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


MAKERS = {"FSDP2": sharded, "tensor parallel": split}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def training_case(which: str) -> None:
    """Two steps of SGD, eager and compiled side by side."""
    torch._dynamo.reset()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(MAKERS[which]())
    seed = 0 if which == "tensor parallel" else torch.distributed.get_rank()
    for step in range(2):
        losses = []
        for model, call in zip(models, (models[0], compiled(models[1])), strict=True):
            torch.manual_seed(10 * step + seed)
            losses.append(call(torch.randn(4, 6)).square().mean())
            losses[-1].backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        assert torch.equal(*losses)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(local(p), local(q)) and torch.equal(local(p.grad), local(q.grad)), name
    assert {len(region.artifacts) for region in regions()} == {1}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("which", MAKERS)
def test_training(which: str, world2: World):
    world2.run(training_case, which)


def tape_case() -> None:
    """FSDP2's hooks are lost on a tape; collectives in the graph of a compiled program are not."""
    torch._dynamo.reset()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(sharded())
    eager, ours = models
    x = torch.randn(4, 6)
    with aotdist.compile_backward(backend="fx"):
        loss = eager(x).sum()
        with pytest.raises(aotdist.UnsupportedProgram, match="FSDP2 calls hooks of its own"):
            loss.backward()
    torch.manual_seed(1)
    eager(x).sum().backward()
    torch.manual_seed(1)
    loss = aotdist.compile(ours, backend="fx")(x).sum()
    with aotdist.compile_backward(backend="fx"):
        loss.backward()
    for (name, p), q in zip(eager.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(local(p.grad), local(q.grad)), name


@pytest.mark.filterwarnings("ignore")
def test_tapes_under_fsdp(world2: World):
    world2.run(tape_case)
