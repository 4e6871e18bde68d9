"""A mixture of experts, one on each rank, in a loop of one's own; how many rows go where depends on data.

Run it as it is, or on several ranks::

    python launch/examples/experts.py
    torchrun --nproc-per-node 2 launch/examples/experts.py

Each row goes to the rank of the expert that its best score names, and back: `all_to_all` with other splits at
every call, all served by one program. With `--eager` nothing is compiled; the losses are the same,
bit for bit.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import aotdist

NUM_STEPS = 30
WIDTH = 16


class Exchanged(torch.autograd.Function):
    """Rows that each rank sends to each; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, receives: list[int], sends: list[int]) -> Tensor:
        """Shapes: (sum(sends), WIDTH) -> (sum(receives), WIDTH)."""
        ctx.receives, ctx.sends = receives, sends
        result = rows.new_empty(sum(receives), WIDTH)
        dist.all_to_all_single(result, rows.contiguous(), receives, sends)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Shapes: (sum(receives), WIDTH) -> (sum(sends), WIDTH)."""
        return Exchanged.apply(*grads, ctx.sends, ctx.receives), None, None


class Experts(nn.Module):
    """A layer whose rows are computed by the ranks that their scores name."""

    def __init__(self, num_experts: int, mine: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Linear(WIDTH, num_experts)
        torch.manual_seed(1 + mine)
        self.expert = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Shapes: (N, WIDTH) -> (N, WIDTH)."""
        weight, chosen = self.scores(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent = F.one_hot(chosen, self.scores.out_features).sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sends, receives = sent.tolist(), received.tolist()
        rows = Exchanged.apply(x[order], receives, sends)
        rows = Exchanged.apply(self.expert(rows), sends, receives)
        return x + torch.zeros_like(x).index_copy(0, order, rows) * weight[:, None]


def make_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Rows, and what to make of them. Shapes: (64, WIDTH), (64, WIDTH)."""
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))
    return x, torch.where(x[:, :1] > 0, x.roll(1, -1), -x)


def start() -> int:
    """Join the other ranks, if there are some; returns this one's number."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", "tcp://localhost:0", rank=0, world_size=1)
    return dist.get_rank()


def main(*, eager: bool) -> None:
    """Train; the first rank prints."""
    rank = start()
    model: Any = Experts(dist.get_world_size(), rank)
    if not eager:
        aotdist.compile(model, backend="fx")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        x, wanted = make_batch(step, rank)
        loss = F.mse_loss(model(x), wanted)
        loss.backward()
        for parameter in model.scores.parameters():  # all ranks have these
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.7f}")
    if rank == 0 and not eager:
        print(f"{len(model.graphs)} graphs")
    dist.barrier()  # gloo's threads let go of their tensors: at Python's exit they would abort it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(eager="--eager" in sys.argv[1:])
