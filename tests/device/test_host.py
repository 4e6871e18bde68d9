"""What a program of a GPU's keeps on the CPU, and what depends on data, comes out as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aotdist
from tests.trace.test_batch_statistics import by_cudnn, synchronised, two_steps

pytestmark = [pytest.mark.device, pytest.mark.timeout(300), pytest.mark.usefixtures("in_float32")]

BACKENDS = ["fx", "inductor", "triton", "auto"]
SCALE = torch.tensor(1.5)


def number_of_the_host(x: Tensor) -> Tensor:
    return (x.sin() * SCALE).exp()


def to_the_host(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin() * 2, (x.mean(0) + 1).cpu() * 3


def chosen(x: Tensor) -> Tensor:
    return x[x > 0].exp() * 2


def places(x: Tensor) -> Tensor:
    return (x > 0).nonzero() + 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", [number_of_the_host, to_the_host, chosen, places])
def test_values(program: Callable[..., Any], backend: str, device: torch.device) -> None:
    x = torch.randn(64, 33, device=device)
    torch.testing.assert_close(aotdist.compile(program, backend=backend)(x), program(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_batch_norms(backend: str, layout: torch.memory_format, device: torch.device) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
        return model.to(device, memory_format=layout)

    eager, compiled = made(), made()
    step = aotdist.compile(compiled, backend=backend)
    for number in range(3):
        x = torch.randn(4, 3, 16, 16, device=device).to(memory_format=layout) * (1 + number)
        out, expected = step(x), eager(x)
        assert out.stride() == expected.stride()
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        for each in (out, expected):
            each.square().mean().backward()
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    for (name, ours), theirs in zip(compiled.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("program", [by_cudnn, synchronised])
def test_running_statistics(program: Callable[..., Any], backend: str, device: torch.device) -> None:
    expected = two_steps(program, device)
    found = two_steps(aotdist.compile(program, backend=backend), device)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_after_a_norm(backend: str, device: torch.device) -> None:
    model = nn.Sequential(nn.LayerNorm(64), nn.Dropout(0.1)).to(device)
    x = torch.randn(256, 64, device=device, requires_grad=True)
    out = aotdist.compile(model, backend=backend)(x)
    out.sum().backward()
    assert out.isfinite().all() and x.grad is not None and x.grad.isfinite().all()
    assert 0.08 < (out == 0).float().mean().item() < 0.12
