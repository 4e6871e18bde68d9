"""Strides that CUDA's libraries give their results, next to those that were traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import aotdist
from tests.kernels.reference import outcome, strides

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]

LAYOUTS = [torch.contiguous_format, torch.channels_last]
ATTENTIONS = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
CONVOLUTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dense": lambda x, weight: F.conv2d(x, weight, padding=1),
    "strided": lambda x, weight: F.conv2d(x, weight, stride=2),
    "transposed": lambda x, weight: F.conv_transpose2d(x, weight, stride=2),
    "depthwise": lambda x, weight: F.conv2d(x, weight[:, :1], groups=16),
    "rows": lambda x, weight: F.conv1d(x.flatten(2), weight.flatten(2)),
}


def assert_as_traced(program: Callable[..., Tensor], *args: Tensor) -> None:
    """Values and strides are eager's, and no graph had to be emitted anew."""

    def around(*given: Tensor) -> Tensor:
        return (program(*(tensor * 1.5 for tensor in given)).float() * 2).sin()

    compiled: Any = aotdist.compile(around, backend="triton")
    for _ in range(2):
        expected, found = outcome(around, args), outcome(compiled, args)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        assert strides(found[0][0]) == strides(expected[0][0])
    (artifact,) = compiled.explain().artifacts
    assert [graph.fusion.restrided for graph in artifact.graphs if graph.fusion] == [(), ()]


def made(device: torch.device, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.rand(*sizes, dtype=dtype, device=device) / 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions(
    kind: str, layout: torch.memory_format, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight = made(device, 2, 16, 12, 12, dtype=dtype), made(device, 16, 16, 3, 3, dtype=dtype)
    assert_as_traced(CONVOLUTIONS[kind], x.to(memory_format=layout).requires_grad_(), weight.requires_grad_())


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("by", ATTENTIONS, ids=str)
def test_attention(by: SDPBackend, heads_first: bool, device: torch.device) -> None:
    sizes = (2, 4, 32, 64) if heads_first else (2, 32, 4, 64)
    queries, keys, values = (made(device, *sizes).requires_grad_() for _ in range(3))

    def attention(*given: Tensor) -> Tensor:
        q, k, v = given if heads_first else (each.transpose(1, 2) for each in given)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with sdpa_kernel(by):
        assert_as_traced(attention, queries, keys, values)


@pytest.mark.parametrize("columns", [64, 24])
def test_grouped_products(columns: int, device: torch.device) -> None:
    offsets = torch.tensor([24, 64], dtype=torch.int32, device=device)
    x, weight = made(device, 64, 32).requires_grad_(), made(device, 2, 32, columns).requires_grad_()
    assert_as_traced(lambda a, b: torch._grouped_mm(a, b, offs=offsets), x, weight)
