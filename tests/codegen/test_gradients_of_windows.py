"""Gradients of windows, and of what is interpolated, that Inductor's own kernels get wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

import aotdist

PROGRAMS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "an average that hangs over": lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
    "of one dimension": lambda x: F.avg_pool1d(x[:, 0], 3, 2, ceil_mode=True),
    "of three dimensions": lambda x: F.avg_pool3d(x, 3, 2, ceil_mode=True),
    "by a divisor": lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True, divisor_override=5),
    "a scale that the sizes do not have": lambda x: F.interpolate(x, scale_factor=1.5),
    "sizes that are no multiples": lambda x: F.interpolate(x, size=(7, 9)),
    "multiples": lambda x: F.interpolate(x, size=(10, 24)),
}


def test_gradients_of_windows() -> None:
    torch.manual_seed(0)
    parts = torch.randn(len(PROGRAMS), 2, 3, 5, 8, requires_grad=True)

    def weighted(parts: Tensor) -> Tensor:
        pooled = [program(part) for part, program in zip(parts, PROGRAMS.values(), strict=True)]
        return torch.stack([(one * torch.arange(one.numel()).view(one.shape)).sum() for one in pooled]).sum()

    found, expected = (
        torch.autograd.grad(call(parts), parts)[0]
        for call in (aotdist.compile(weighted, backend="inductor"), weighted)
    )
    for name, part, eager in zip(PROGRAMS, found, expected, strict=True):
        torch.testing.assert_close(part, eager, msg=lambda text, name=name: f"{name}: {text}")
