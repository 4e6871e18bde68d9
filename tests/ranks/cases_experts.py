"""A layer of experts on each rank: how many rows a rank sends to which differs from call to call."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import aotdist
from benchmarks.ranks.scenarios.programs import Experts


def trained(backend: str | None) -> list[Any]:
    model = Experts(width=4)
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
