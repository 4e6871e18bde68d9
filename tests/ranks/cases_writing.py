"""Collectives that write, called inside of programs; the two ranks hold different numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import aotdist
from aotdist.errors import UnsupportedProgram


class SumForward(torch.autograd.Function):
    """As transformers adds up what tensor-parallel experts compute: in place, unmarked."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


def into_an_input(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    kept += 1
    dist.all_reduce(kept)
    return x * kept


def through_a_view(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(kept[1:], op=dist.ReduceOp.MAX)
    return x * kept


def of_an_intermediate(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    total = (x * kept).detach().clone()
    work = dist.all_reduce(total, op=dist.ReduceOp.PRODUCT, async_op=True)
    work.wait()
    return x * total


def from_a_rank(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    dist.broadcast(kept, src=1)
    return x * kept


def in_both_directions(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return SumForward.apply(SumBackward.apply(x) * kept)


PROGRAMS = {
    program.__name__: program
    for program in (into_an_input, through_a_view, of_an_intermediate, from_a_rank, in_both_directions)
}


def played(program: Callable[..., torch.Tensor]) -> list[Any]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    kept, seen = torch.randn(4, generator=generator), list[Any]()
    for _ in range(2):
        x = torch.randn(4, generator=generator).requires_grad_()
        out = program(x, kept)
        out.square().sum().backward()
        seen += [out.tolist(), x.grad.tolist(), kept.tolist(), kept._version, x._version]
    return seen


def same_as_eager(name: str) -> None:
    compiled = aotdist.compile(PROGRAMS[name], backend="fx")
    assert played(PROGRAMS[name]) == played(compiled)
    assert len(aotdist.api.compiled_call(compiled).artifacts) == 1


def refused() -> None:
    def gathers(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    with pytest.raises(UnsupportedProgram, match="`c10d::allgather_`, a collective that writes") as raised:
        aotdist.compile(gathers, backend="fx")(torch.ones(2))
    assert "dist.all_gather(parts, x)" in str(raised.value)
