"""Kernels that go through memory in two orders go through it by tiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from aotdist.kernels.access import vector_length
from tests.kernels.reference import Emissions, assert_same


def numbers(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0))


def both_layouts(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    return y, (y + 1).t().contiguous()


TILED: dict[str, tuple[Callable[[Tensor], object], tuple[int, ...]]] = {
    "a transposed copy": (lambda x: (x + 1).t().contiguous(), (48, 80)),
    "both layouts": (both_layouts, (48, 80)),
    "of batches": (lambda x: x.sin().transpose(1, 2).contiguous(), (3, 48, 80)),
    "the first dimension last": (lambda x: x.sin().permute(1, 2, 0).contiguous(), (48, 3, 80)),
    "sides that fill no tile": (lambda x: x.sin().t().contiguous(), (301, 259)),
    "a sum of both": (lambda x: x + x.t(), (64, 64)),
    "heads beside each other, transposed": (
        lambda x: x.sin().transpose(1, 2).reshape(-1, 4 * 32).t().contiguous(),
        (2, 4, 48, 32),
    ),
}


@pytest.mark.parametrize("name", TILED)
def test_two_orders(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    program, sizes = TILED[name]
    assert_same(program, numbers(*sizes))
    (kernel,) = (one.kernel for fused in emissions.made for one in fused.kernels)
    assert kernel.is_tiled
    if sizes != (301, 259):
        accesses = [(load.index, load.stored) for load in kernel.loads()]
        accesses += [(store.index, store.stored) for store in kernel.stores]
        assert {vector_length(kernel, index, dtype) for index, dtype in accesses} == {4}


def a_sum_and_a_transposed_copy(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp().sum(1), x.cos().t().contiguous()


def test_a_kernel_that_reduces_writes_no_transposed_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write it element by element."""
    emissions = Emissions(monkeypatch)
    assert_same(a_sum_and_a_transposed_copy, numbers(48, 80))
    sums, copies = (one.kernel for fused in emissions.made for one in fused.kernels)
    assert (sums.is_tiled, copies.is_tiled) in ((False, True), (True, False))


ONE_ORDER: dict[str, tuple[Callable[[Tensor], object], tuple[int, ...]]] = {
    "heads": (lambda x: x.sin().transpose(1, 2).contiguous(), (4, 16, 20, 32)),
    "a number for each row": (lambda x: x + x[:, :1], (64, 64)),
    "few columns": (lambda x: x.sin().t().contiguous(), (64, 8)),
}


@pytest.mark.parametrize("name", ONE_ORDER)
def test_one_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    program, sizes = ONE_ORDER[name]
    assert_same(program, numbers(*sizes))
    assert not any(one.kernel.is_tiled for fused in emissions.made for one in fused.kernels)
