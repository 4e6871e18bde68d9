"""A classifier of noisy points, trained by whole compiled steps: `aotdist.train_step`.

Run it as it is, or on several ranks, where the model is sharded with FSDP2::

    python launch/examples/train_step.py
    torchrun --nproc-per-node 2 launch/examples/train_step.py

With `--eager` the same steps run as they are written; the losses are the same, bit for bit.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import aotdist

NUM_STEPS = 30
ACCUMULATE = 2


def make_model() -> nn.Module:
    """The same weights on every rank, sharded if there are several."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(2, 32), *blocks, nn.Linear(32, 4))
    if dist.is_initialized():
        for block in blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def make_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Points of the plane and their quadrants. Shapes: (64, 2), (64,)."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    points = torch.randn(64, 2, generator=generator)
    quadrant = 2 * (points[:, 0] > 0).long() + (points[:, 1] > 0).long()
    return points + 0.05 * torch.randn(64, 2, generator=generator), quadrant


def loss_of(model: nn.Module, points: Tensor, quadrant: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and how many of the batch were right."""
    scores = model(points)
    return F.cross_entropy(scores, quadrant), (scores.argmax(-1) == quadrant).float().mean()


def main(*, eager: bool) -> None:
    """Train; the first rank prints."""
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    backend = "eager" if eager else "fx"
    step = aotdist.train_step(model, loss_of, optimizer, clip=1.0, accumulate=ACCUMULATE, backend=backend)
    for at in range(NUM_STEPS):
        parts = [step(*make_batch(ACCUMULATE * at + part, rank)) for part in range(ACCUMULATE)]
        loss, right = parts[-1]
        schedule.step()
        if rank == 0 and at % 10 == 9:
            print(f"step {at + 1}: loss {loss.item():.7f}, right {right.item():.0%}")
    if rank == 0 and not eager:
        print(f"{len(step.graphs)} graphs, the last of {len(step.graphs[-1]['inference'].graph.nodes)} nodes")
    if dist.is_initialized():
        dist.barrier()  # gloo's threads let go of their tensors: at Python's exit they would abort it
        dist.destroy_process_group()


if __name__ == "__main__":
    main(eager="--eager" in sys.argv[1:])
