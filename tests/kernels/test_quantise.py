"""Casts to float8 share a kernel with what computes their operand and their scales, and both layouts one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import aotdist
from tests.kernels.reference import Emissions

_LARGEST = 448.0
Quantised = tuple[Tensor, Tensor]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def quantised(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def scale_of(x: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    return _LARGEST / x.abs().amax(dims, keepdim=True).float().clamp(min=1e-12)


def by_row(x: Tensor, weight: Tensor) -> Quantised:
    y = normed(x, weight)
    scale = scale_of(y, -1)
    return quantised(y, scale), scale


def by_tensor(x: Tensor, weight: Tensor) -> Quantised:
    y = normed(x, weight)
    scale = scale_of(y, (0, 1))
    return quantised(y, scale), scale


def delayed(x: Tensor, weight: Tensor) -> Quantised:
    """By the largest element of an earlier step; this one's is for a later."""
    y = normed(x, weight)
    return quantised(y, weight[0].float()), y.abs().amax().float()


def by_block(x: Tensor, weight: Tensor) -> Quantised:
    blocks = x.view(x.shape[0], -1, 128)
    scale = scale_of(blocks, -1)
    return quantised(blocks, scale).view(x.shape), scale


def in_two_layouts(x: Tensor, weight: Tensor) -> Quantised:
    q = quantised(x, weight[0].float())
    return q, q.t().contiguous()


PROGRAMS: dict[Callable[[Tensor, Tensor], Quantised], int] = {
    by_row: 1,
    by_tensor: 3,
    delayed: 2,
    by_block: 1,
    in_two_layouts: 1,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_is_read_once(
    program: Callable[[Tensor, Tensor], Quantised], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    emissions = Emissions(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*sizes, generator=generator).to(dtype) for sizes in ((80, 640), (640,)))
    expected = program(x, weight)
    found = aotdist.compile(program, backend="triton", settings={"emulate_casts": True})(x, weight)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype and one.stride() == other.stride()
        # Sums in another order may round another way, now and then: a step of e4m3 is an eighth at most.
        is_narrow = one.dtype is torch.float8_e4m3fn
        torch.testing.assert_close(one.float(), other.float(), rtol=0.126 if is_narrow else 1e-5, atol=1e-2)
        assert not is_narrow or (one.float() != other.float()).float().mean() < 0.01
    assert emissions.num_kernels() == PROGRAMS[program]
    assert not emissions.made[0].reasons
