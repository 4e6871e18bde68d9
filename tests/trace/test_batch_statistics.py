"""Batch norms of GPUs write running statistics as eager does; here kernels of the CPU stand in for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import aotdist

aten = torch.ops.aten


def normed(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *rest: Any) -> Any:
    return *aten.native_batch_norm(x, weight, bias, mean, variance, *rest), x.new_empty(0, dtype=torch.uint8)


def normed_back(
    x: Tensor, grad: Tensor, weight: Tensor, mean: Tensor, variance: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    saved_mean, saved_deviation, eps, _ = rest
    return aten.native_batch_norm_backward(
        grad, x, weight, mean, variance, saved_mean, saved_deviation, True, eps, [True] * 3
    )


def gathered(
    x: Tensor, mean: Tensor, deviation: Tensor, running_mean: Tensor, running_variance: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    running_mean.mul_(0.9).add_(mean[0], alpha=0.1)
    running_variance.mul_(0.9).add_(deviation[0], alpha=0.1)
    return mean[0] + 0, deviation[0] + 0


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("cudnn_batch_norm", normed, "CPU")
        library.impl("cudnn_batch_norm_backward", normed_back, "CPU")
        library.impl("batch_norm_gather_stats_with_counts", gathered, "CPU")
        yield


def by_cudnn(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    y = torch.cudnn_batch_norm(x, weight, bias, mean, variance, True, 0.1, 1e-5)[0]
    return y * mean.sum(), variance + 1


def synchronised(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    means, deviations = x.mean((0, 2))[None], x.std((0, 2))[None]
    with torch.no_grad():
        centre, _ = torch.batch_norm_gather_stats_with_counts(
            x, means, deviations, mean, variance, 0.1, 1e-5, x.new_tensor([4.0])
        )
    return (x - centre[:, None]) * weight[:, None] + bias[:, None] + mean.sum(), variance + 1


def two_steps(program: Any, device: str | torch.device = "cpu") -> list[Tensor]:
    torch.manual_seed(0)
    given = (torch.randn(4, 3, 5), torch.rand(3), torch.rand(3))
    leaves = [tensor.to(device).requires_grad_() for tensor in given]
    mean, variance = torch.zeros(3, device=device), torch.ones(3, device=device)
    seen: list[Tensor] = []
    for _ in range(2):
        y, late = program(*leaves, mean, variance)
        y.square().sum().backward()
        seen += [y.detach(), late]
    return [*seen, mean, variance, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


@pytest.mark.parametrize("program", [by_cudnn, synchronised])
@pytest.mark.parametrize("backend", ["fx", "inductor"])
def test_running_statistics_are_eager_s(program: Any, backend: str) -> None:
    expected, found = two_steps(program), two_steps(aotdist.compile(program, backend=backend))
    tolerance = {"rtol": 0.0, "atol": 0.0} if backend == "fx" else {}
    torch.testing.assert_close(found, expected, **tolerance)


def test_the_graph_writes_nothing_by_itself() -> None:
    model = aotdist.compile(by_cudnn, backend="fx")
    two_steps(model)
    assert "writes: args[3], args[4]" in str(model.explain())  # type: ignore[attr-defined]
