"""What chooses two of four elements and packs them is made of operators that kernels are written for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import aotdist
from aotdist.subclasses.sparse24_operators import choose_24, compress_24
from aotdist.subclasses.sparse24_packing import DTYPES, compress, encode, magnitude_mask
from tests.kernels.reference import Emissions
from tests.subclasses.test_sparse24_linear import net, tokens


def packed(x: Tensor) -> tuple[Tensor, Tensor]:
    meta = choose_24(x, transposable=False)
    return compress_24(x, meta), meta


def matrix(dtype: torch.dtype) -> Tensor:
    """With ties, zeros of both signs, and what is no number."""
    x = (30 * torch.randn(16, 64, generator=torch.Generator().manual_seed(0))).to(dtype)
    x[0, :8] = 1
    if dtype.is_floating_point:
        x[1, :8] = torch.tensor([-0.0, 0.0, -0.0, 0.0, math.nan, math.inf, -math.inf, 1.0])
        x[2, :4] = math.nan
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_kernel_chooses_and_packs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the matrix once, and gives the bits that are chosen and packed by groups."""
    emissions = Emissions(monkeypatch)
    x = matrix(dtype)
    values, meta = aotdist.compile(packed, backend="triton")(x)
    expected = encode(magnitude_mask(x))
    assert torch.equal(meta, expected)
    assert torch.equal(values.view(torch.uint8), compress(x, expected).view(torch.uint8))
    (kernel,) = emissions.made[0].kernels
    assert kernel.num_bytes == x.nbytes + values.nbytes + meta.nbytes
    assert {str(node.target) for node in emissions.made[0].reasons} <= {"aten.view.dtype"}


def test_columns_of_a_transposed_matrix_are_packed_too() -> None:
    """After a copy, whose NaNs may have other bits."""
    x = matrix(torch.bfloat16).t().contiguous().t()
    found = aotdist.compile(packed, backend="triton")(x)
    torch.testing.assert_close(found, packed(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("options", [{}, {"operand": "input"}, {"select": "held"}], ids=str)
def test_layers_choose_and_pack_in_kernels(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    gradients: list[list[Tensor | None]] = []
    for backend in ("fx", "triton"):
        module = net()
        aotdist.sparsify_24(module, **options)
        aotdist.compile(module, backend=backend)(tokens()).backward()
        gradients.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
    library = {str(node.target) for fused in emissions.made for node in fused.reasons}
    own = {name for name in library if name.startswith("aotdist")}
    assert own <= {"aotdist.linear_24.default", "aotdist.mm_24.default"}


def test_shifts_and_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)

    def program(x: Tensor) -> list[Tensor]:
        return [x << 3, x >> 2, x & 15, x | 64, x ^ 77]

    for dtype in (torch.uint8, torch.int32, torch.int64):
        x = torch.arange(0, 256).to(dtype) * (1 if dtype is torch.uint8 else -100003)
        for one, other in zip(aotdist.compile(program, backend="triton")(x), program(x), strict=True):
            assert torch.equal(one, other)
    assert emissions.num_kernels() == 3
