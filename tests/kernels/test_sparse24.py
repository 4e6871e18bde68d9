"""What chooses two of four elements and packs them is made of operators that kernels are written for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import aotdist
from aotdist.subclasses.sparse24_packing import compress, encode, magnitude_mask
from tests.kernels.reference import Emissions
from tests.subclasses.test_sparse24_linear import net, tokens


def packed(x: Tensor) -> tuple[Tensor, Tensor]:
    places = encode(magnitude_mask(x))
    return compress(x, places), places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_three_kernels(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask; the places, two bits each; the values at these."""
    emissions = Emissions(monkeypatch)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, :8] = 1
    found = aotdist.compile(packed, backend="triton")(x)
    for one, other in zip(found, packed(x), strict=True):
        assert torch.equal(one, other)
    assert emissions.num_kernels() == 3
    assert {str(node.target) for node in emissions.made[0].reasons} == {"aten.view.dtype"}


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
