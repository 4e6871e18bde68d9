"""Models on two ranks behind Dynamo: FSDP2, whose hooks break its graph, and DTensors as inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as checkpoint_in_place
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import aotdist
from aotdist.dynamo import regions
from tests.dynamo.comparison import FX, compiled
from tests.dynamo.test_compiled_inside import SELECTIVE, in_place, wrapped
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


def by_us(block: nn.Module) -> nn.Module:
    block.compile(backend="aotdist", options=FX)
    return block


def checkpointed_in_place(block: nn.Module) -> nn.Module:
    checkpoint_in_place(block)
    return block


BLOCKS = {
    "compiled in place": lambda block: in_place(checkpoint_wrapper(block, context_fn=SELECTIVE)),
    "compiled, in a wrapper": lambda block: wrapped(checkpoint_wrapper(block, context_fn=SELECTIVE)),
    "compiled in checkpoints": lambda block: checkpoint_wrapper(in_place(block)),
    "checkpoints in place": lambda block: in_place(checkpointed_in_place(block)),
    "by our backend": lambda block: by_us(checkpoint_wrapper(block, context_fn=SELECTIVE)),
}
"""As torchtitan has them: checkpoints, most of them selective, around or inside of what is compiled."""


def in_blocks(which: str) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    model.blocks = nn.ModuleList(map(BLOCKS[which], model.blocks))
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def trained(which: str, by: str) -> list[torch.Tensor]:
    """The losses of three steps, and the shards after them."""
    torch._dynamo.reset()
    model = in_blocks(which)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step = aotdist.train_step(model, loss_of, optimizer, backend="fx")
    if by == "compile":
        aotdist.compile(model, backend="fx")
    losses = []
    for seed in range(3):
        torch.manual_seed(10 * seed + torch.distributed.get_rank())
        x = torch.randn(4, 6)
        if by == "train_step":
            with torch.compiler.set_stance("default" if seed else "force_eager"):  # the first runs eagerly
                losses.append(step(x))
            continue
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(local(param.detach()) for param in model.parameters())]


def blocks_case(which: str) -> None:
    with torch.compiler.set_stance("force_eager"):
        eager = trained(which, "itself")
    ways = ["itself", "compile"] if which == "by our backend" else ["compile", "train_step"]
    for by in ways:
        assert all(map(torch.equal, eager, trained(which, by))), by


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "which",
    [
        "compiled in place",
        "checkpoints in place",
        "by our backend",
        *(
            pytest.param(name, marks=pytest.mark.sweep)
            for name in ("compiled, in a wrapper", "compiled in checkpoints")
        ),
    ],
)
def test_blocks_that_are_compiled(which: str, world2: World):
    world2.run(blocks_case, which)
