"""A classifier of noisy points, trained in Lightning Fabric's loop: `fabric.setup(aotdist.compile(model))`.

Run it on one rank, or on several, where Fabric wraps the model in DDP, or with `--shard` in FSDP2::

    python launch/examples/fabric_loop.py
    torchrun --nproc-per-node 2 launch/examples/fabric_loop.py --shard

With `--eager` the same loop runs uncompiled; the losses are the same, bit for bit.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_fabric import Fabric
from lightning_fabric.strategies.model_parallel import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import aotdist

NUM_EPOCHS = 3


def make_model() -> nn.Sequential:
    """The same weights on every rank."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(2, 32), *blocks, nn.Linear(32, 4))


def make_loader() -> DataLoader[tuple[Tensor, ...]]:
    """Points of the plane and their quadrants; Fabric gives each rank its part of them."""
    points = torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
    quadrants = 2 * (points[:, 0] > 0).long() + (points[:, 1] > 0).long()
    return DataLoader(TensorDataset(points, quadrants), batch_size=32)


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """What Fabric calls to shard the model."""
    for block in model.children():
        fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def main(*, eager: bool, shard: bool) -> None:
    """Train; the first rank prints."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    strategy = ModelParallelStrategy(sharded, ranks, 1) if shard else "ddp" if ranks > 1 else "auto"
    fabric: Any = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    model = make_model()
    if not eager:
        aotdist.compile(model, backend="fx")
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = fabric.setup_dataloaders(make_loader())
    loss = torch.tensor(0.0)
    for epoch in range(NUM_EPOCHS):
        for at, (points, quadrants) in enumerate(loader):
            accumulating = at % 2 == 0
            with fabric.no_backward_sync(model, enabled=accumulating and ranks > 1):
                loss = F.cross_entropy(model(points), quadrants)
                fabric.backward(loss)
            if not accumulating:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        if fabric.is_global_zero:
            print(f"epoch {epoch}: loss {mean.item():.7f}")
    if fabric.is_global_zero and not eager:
        print(f"{len(model.graphs)} graphs")
    fabric.barrier()  # gloo's threads let go of their tensors: at Python's exit they would abort it
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(eager="--eager" in sys.argv[1:], shard="--shard" in sys.argv[1:])
