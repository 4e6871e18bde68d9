"""Collectives that write, called inside of programs; the two ranks hold different numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather

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


def from_all_ranks(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    gathered, parts = torch.empty(8), [torch.empty(4) for _ in range(2)]
    dist.all_gather_into_tensor(gathered, kept)
    dist.all_gather(parts, (x * 2).detach())
    kept.copy_(gathered[:4] - parts[1])
    return x * kept * gathered[4:]


def a_part_of_the_sum(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, kept)
    kept[2:] = part
    return x.view(2, 2) * part


def some_to_each(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    halves, parts = torch.empty(4), torch.empty(4)
    dist.all_to_all_single(halves, kept)
    sent = [1, 3] if dist.get_rank() == 0 else [3, 1]
    dist.all_to_all_single(parts, kept.clone(), sent, sent)
    kept -= halves
    return x * parts


def lists_of_parts(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    part, halves, mine = torch.empty(2), [torch.empty(2), torch.empty(2)], torch.empty(2, 2)
    others = kept.roll(1).view(2, 2)
    dist.reduce_scatter(part, list(kept.clone().chunk(2)), op=dist.ReduceOp.MAX)
    dist.all_to_all(halves, list((x * 2).detach().chunk(2)))
    dist.scatter(mine, [others, others + 1] if dist.get_rank() == 1 else None, src=1)
    kept[2:] = part
    return x * torch.cat(halves) * mine.flatten()


class AddedUp(torch.autograd.Function):
    """As `torch.distributed.nn.functional.all_gather` reduces where NCCL runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        mine = torch.empty(4)
        dist.reduce_scatter(mine, list(grad.chunk(2)))
        return mine


def features_of_all_ranks(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """As contrastive losses gather them, with gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is deprecated, and what open_clip calls
        gathered = torch.cat(all_gather(x * kept))
    return gathered.sin() * AddedUp.apply(x)


PROGRAMS = {
    program.__name__: program
    for program in (
        into_an_input,
        through_a_view,
        of_an_intermediate,
        from_a_rank,
        in_both_directions,
        from_all_ranks,
        a_part_of_the_sum,
        some_to_each,
        lists_of_parts,
        features_of_all_ranks,
    )
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
    def reduces(x: torch.Tensor) -> torch.Tensor:
        dist.reduce(x, dst=0)
        return x * 2

    with pytest.raises(UnsupportedProgram, match="`c10d::reduce_`, a collective that writes") as raised:
        aotdist.compile(reduces, backend="fx")(torch.ones(2))
    assert "dist.reduce(x, dst=0)" in str(raised.value)
