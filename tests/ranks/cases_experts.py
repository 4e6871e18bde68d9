"""A layer of experts on each rank: how many rows a rank sends to which differs from call to call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as collectives

import aotdist


class Experts(nn.Module):
    """Sends each row to the rank that its larger score names, which has the expert, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.expert = nn.Linear(4, 2), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, rank = self.scores(x).softmax(-1).max(-1)
        order, group = rank.argsort(stable=True), dist.group.WORLD
        sent = F.one_hot(rank, 2).sum(0)
        there = collectives.all_to_all_single(sent, None, None, group)
        sends, receives = sent.tolist(), there.tolist()
        rows = collectives.all_to_all_single_autograd(x[order], receives, sends, group)
        rows = collectives.all_to_all_single_autograd(self.expert(rows), sends, receives, group)
        return torch.zeros_like(x).index_copy(0, order, rows) * weight[:, None]


def trained(backend: str | None) -> list[Any]:
    torch.manual_seed(0)
    model = Experts()
    if backend is not None:
        aotdist.compile(model, backend=backend)
    seen, generator = list[Any](), torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        x = torch.randn(6, 4, generator=generator).requires_grad_()
        loss = model(x).square().sum()
        loss.backward()
        seen += [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    assert backend is None or len(aotdist.api.compiled_call(model).artifacts) == 1
    return seen


def same_as_eager() -> None:
    assert all(map(torch.equal, trained(None), trained("fx")))


def close_to_eager() -> None:
    torch.testing.assert_close(trained("auto"), trained(None))
