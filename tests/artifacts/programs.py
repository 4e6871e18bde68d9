"""Programs to build artifacts of: each makes itself anew, and the same each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from aotdist.launch.config import ModelOptions
from aotdist.launch.model import build_decoder

Made = tuple[Any, tuple[Any, ...]]


def mlp() -> Made:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 4)
    return nn.Sequential(*layers), (torch.randn(5, 8),)


def mlp_in_eval_mode() -> Made:
    model, args = mlp()
    return model.eval(), args


class WithLoss(nn.Module):
    """A loss, and the logits that it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.layers(x)
        return nn.functional.cross_entropy(logits, torch.arange(len(x)) % 4), logits


def with_loss() -> Made:
    torch.manual_seed(0)
    return WithLoss(), (torch.randn(5, 8),)


class Counting(nn.Module):
    """Buffers that are written and assigned, results that are views of inputs, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor, scale: float) -> dict[str, Any]:
        self.calls = self.calls + 1
        self.total.add_(x.detach().sum(0))
        y = self.linear(x) * scale
        return {"y": y, "rows": x[1:], "first": y[0], "scale": scale, "pair": (y.relu(), None)}


def counting() -> Made:
    torch.manual_seed(0)
    return Counting(), (torch.randn(3, 4), 0.5)


def function() -> Made:
    torch.manual_seed(0)
    weight, table = torch.randn(4, 4, requires_grad=True), torch.arange(4.0)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return torch.cond(y.sum() > 0, lambda a: a @ weight, lambda a: a - table, (x,)).square().sum()

    return loss, (torch.randn(3, 4), torch.ones(2))


def decoder() -> Made:
    options = ModelOptions(dim=32, num_layers=2, num_heads=2, num_kv_heads=1, hidden_dim=32)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    return build_decoder(options, seq_len=16, seed=0), (tokens,)


PROGRAMS: dict[str, Callable[[], Made]] = {
    "an MLP": mlp,
    "an MLP in eval mode": mlp_in_eval_mode,
    "buffers and views": counting,
    "a function": function,
    "a decoder": decoder,
}


def sharded() -> Made:
    """FSDP2; the shards of the ranks differ."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 7), nn.GELU()) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(7, 5))
    for part in model:
        fully_shard(part)
    fully_shard(model)
    return model, (torch.randn(3, 7) + dist.get_rank(),)


def sharded_evenly() -> Made:
    """FSDP2; the shards of the ranks are alike."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    fully_shard(model)
    return model, (torch.randn(3, 8) + dist.get_rank(),)


def tensor_parallel() -> Made:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(7, 8), nn.GELU(), nn.Linear(8, 6))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, (torch.randn(3, 7),)


class Vocabulary(nn.Module):
    """A sharded embedding, of which each rank holds other rows: its graph has numbers of the rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def sharded_vocabulary() -> Made:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = Vocabulary()
    parallelize_module(model, mesh, {"embedding": RowwiseParallel(), "head": ColwiseParallel()})
    return model, (torch.tensor([[1, 9, 4], [5, 0, 6]]),)


PROGRAMS_OF_TWO_RANKS: dict[str, Callable[[], Made]] = {
    "FSDP2": sharded,
    "FSDP2, alike": sharded_evenly,
    "tensor parallel": tensor_parallel,
    "a sharded vocabulary": sharded_vocabulary,
}
