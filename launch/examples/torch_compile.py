"""A classifier of noisy points in a loop of one's own, compiled by `torch.compile(backend="aotdist")`.

Run it as it is, or on several ranks, where the model is sharded with FSDP2::

    python launch/examples/torch_compile.py
    torchrun --nproc-per-node 2 launch/examples/torch_compile.py

Dynamo captures what it can of the model, and breaks its graph at what it cannot: hooks of FSDP2, here. With
`--eager` nothing is compiled; the losses are the same, bit for bit.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from aotdist.dynamo import regions

NUM_STEPS = 30


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (N, 32) -> (N, 32)."""
        return x + F.dropout(F.gelu(self.linear(self.norm(x))), 0.1, self.training)


class Classifier(nn.Module):
    """Points of the plane to scores of the four quadrants."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(32, 4)

    def forward(self, points: Tensor) -> Tensor:
        """Shapes: (N, 2) -> (N, 4)."""
        x = self.first(points)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def make_model() -> nn.Module:
    """The same weights on every rank, sharded if there are several."""
    torch.manual_seed(0)
    model = Classifier()
    if dist.is_initialized():
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def make_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Points of the plane and their quadrants. Shapes: (64, 2), (64,)."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    points = torch.randn(64, 2, generator=generator)
    quadrant = 2 * (points[:, 0] > 0).long() + (points[:, 1] > 0).long()
    return points + 0.05 * torch.randn(64, 2, generator=generator), quadrant


def main(*, eager: bool) -> None:
    """Train; the first rank prints."""
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model = make_model()
    call = model if eager else torch.compile(model, backend="aotdist", options={"backend": "fx"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    for step in range(NUM_STEPS):
        points, quadrant = make_batch(step, rank)
        loss = F.cross_entropy(call(points), quadrant)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.7f}")
    if rank == 0 and not eager:
        print(", ".join(f"{region.name}: {len(region.artifacts)}" for region in regions()))
    if dist.is_initialized():
        dist.barrier()  # gloo's threads let go of their tensors: at Python's exit they would abort it
        dist.destroy_process_group()


if __name__ == "__main__":
    main(eager="--eager" in sys.argv[1:])
