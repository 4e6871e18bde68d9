"""A classifier of noisy points, trained in accelerate's loop: `aotdist.prepare`.

Run it on one rank, or on several, where the model is sharded with FSDP2::

    python launch/examples/accelerate_loop.py
    torchrun --nproc-per-node 2 launch/examples/accelerate_loop.py
    accelerate launch --config_file launch/examples/accelerate.yaml launch/examples/accelerate_loop.py

With `--dynamo` accelerate prepares the model itself, and `torch.compile` compiles it, by way of a plugin.
With `--eager` the same loop runs uncompiled; the losses are the same, bit for bit.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import aotdist
from aotdist.launch.accelerate import AotdistPlugin

NUM_EPOCHS = 3


class Classifier(nn.Module):
    """Blocks between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(3)
        )
        self.last = nn.Linear(32, 4)

    def forward(self, points: Tensor) -> Tensor:
        """Scores of the four quadrants. Shapes: (batch, 2) to (batch, 4)."""
        hidden = self.first(points)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.last(hidden)


def make_loader() -> DataLoader[tuple[Tensor, ...]]:
    """Points of the plane and their quadrants; accelerate gives each rank its part of the batches."""
    points = torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
    quadrants = 2 * (points[:, 0] > 0).long() + (points[:, 1] > 0).long()
    return DataLoader(TensorDataset(points, quadrants), batch_size=32)


def main(*, dynamo: bool) -> None:
    """Train, and go on from a checkpoint; the first rank prints."""
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # without a GPU accelerate does not join the ranks unless told to
        gradient_accumulation_steps=2,
        dynamo_plugin=AotdistPlugin("fx"),
    )
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_EPOCHS * 16)
    objects = model, optimizer, make_loader(), schedule
    prepared = accelerator.prepare(*objects) if dynamo else aotdist.prepare(accelerator, *objects)
    model, optimizer, loader, schedule = prepared

    def train_epoch() -> float:
        loss = torch.tensor(0.0)
        for points, quadrants in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(points), quadrants)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        mean: Any = accelerator.reduce(loss.detach(), "mean")
        return mean.item()

    for epoch in range(NUM_EPOCHS):
        accelerator.print(f"epoch {epoch}: loss {train_epoch():.7f}")
    with tempfile.TemporaryDirectory() as own:
        (folder,) = broadcast_object_list([own])  # that of rank 0 is the one that all ranks see
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        after = train_epoch()
        accelerator.load_state(folder)
        accelerator.wait_for_everyone()
        accelerator.print(f"gone on from the checkpoint: the same {train_epoch() == after}, loss {after:.7f}")
        accelerator.wait_for_everyone()
    weights: Any = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        sizes = [list(value.shape) for value in weights.values()]
        print(f"{len(sizes)} weights to keep, the first of size {sizes[0]}")
    accelerator.wait_for_everyone()  # gloo's threads let go of their tensors: at exit they would abort
    accelerator.end_training()


if __name__ == "__main__":
    with aotdist.disable() if "--eager" in sys.argv[1:] else nullcontext():
        main(dynamo="--dynamo" in sys.argv[1:])
