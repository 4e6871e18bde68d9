"""Products of blocks: which kernel is chosen, and that it is handed what it reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aotdist.subclasses import float8_blocks
from aotdist.subclasses.float8_blocks import SQUARE, TILE, Block, Kernel, choose_kernel, mm_blocks
from aotdist.subclasses.float8_tensor import E4M3, block_amax, quantise, scale_for
from aotdist.torch_seam.functional import FakeTensorMode

KERNELS: dict[str, tuple[tuple[int, int] | None, str | None, Block, Block, Kernel]] = {
    "no GPU": (None, "13.0", TILE, SQUARE, "fp32"),
    "Turing": ((7, 5), "13.0", TILE, SQUARE, "fp32"),
    "Ampere": ((8, 0), "13.0", TILE, SQUARE, "bf16"),
    "Ada": ((8, 9), "13.0", TILE, TILE, "bf16"),
    "Hopper": ((9, 0), "13.0", TILE, SQUARE, "blockwise"),
    "Hopper, tiles": ((9, 0), "12.9", TILE, TILE, "blockwise"),
    "Hopper, squares first": ((9, 0), "12.10", SQUARE, TILE, "blockwise"),
    "Hopper, squares": ((9, 0), "13.0", SQUARE, SQUARE, "bf16"),
    "Hopper, other blocks": ((9, 0), "13.0", TILE, (64, 64), "bf16"),
    "Hopper, older CUDA": ((9, 0), "12.8", TILE, SQUARE, "bf16"),
    "CDNA 3": ((9, 4), None, TILE, SQUARE, "bf16"),
    "Blackwell": ((10, 0), "13.0", TILE, SQUARE, "bf16"),
}


@pytest.mark.parametrize("capability, cuda, left, right, kernel", KERNELS.values(), ids=KERNELS.keys())
def test_which_kernel_is_chosen(capability, cuda, left, right, kernel) -> None:
    assert choose_kernel(capability, cuda, left, right) == kernel


Operand = tuple[torch.Tensor, torch.Tensor]


def operand(rows: int, columns: int, block: Block) -> Operand:
    """Numbers whose scales differ a thousandfold."""
    x = torch.randn(rows, columns) * torch.logspace(-2, 0, columns) * torch.logspace(-1, 0, rows)[:, None]
    scale = scale_for(block_amax(x, block), E4M3)
    return quantise(x, scale, E4M3, block), scale


SIZES = {
    "whole": (256, 512, 384),
    "odd tokens": (21, 640, 144),
    "one token, one block": (1, 128, 16),
    "one block each": (128, 128, 128),
}
PAIRS = {"input": (TILE, SQUARE), "weight": (TILE, TILE), "squares first": (SQUARE, TILE)}


def operands(size: str, pair: str) -> tuple[Operand, Operand]:
    (m, k, n), (left, right) = SIZES[size], PAIRS[pair]
    return operand(m, k, left), operand(n, k, right)


class Cublas(TorchDispatchMode):
    """Its kernel for blocks, which no CPU has: scales are read where their recipe says that they lie."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._scaled_mm_v2.default:
            return func(*args, **(kwargs or {}))
        self.calls += 1
        a, b, (a_scale,), (a_recipe,), _, (b_scale,), (b_recipe,), _, bias, dtype = args
        assert bias is None and dtype in (torch.bfloat16, torch.float32) and not kwargs
        assert a.stride() == (a.size(1), 1) and b.stride() == (1, b.size(0))
        assert not any(size % 16 for size in (*a.shape, *b.shape))
        wide = self.scaled(a, a_scale, a_recipe), self.scaled(b.t(), b_scale, b_recipe)
        return (wide[0] @ wide[1].t()).to(dtype)

    def scaled(self, x: torch.Tensor, scale: torch.Tensor, recipe: int) -> torch.Tensor:
        rows, blocks = x.size(0), x.size(1) // 128
        if recipe == torch.nn.functional.ScalingType.BlockWise1x128.value:
            lying = scale.as_strided((rows, blocks), (1, rows))
            return x.float() * lying.repeat_interleave(128, 1)
        step = -(-blocks // 4) * 4
        lying = scale.as_strided((rows // 128, blocks), (step, 1))
        return x.float() * lying.repeat_interleave(128, 0).repeat_interleave(128, 1)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_are_handed_what_they_take(
    monkeypatch: pytest.MonkeyPatch, size: str, pair: str, dtype: torch.dtype
) -> None:
    """A GPU's kernels multiply what the operands stand for, as a CPU does."""
    (left, left_scale), (right, right_scale) = operands(size, pair)
    arguments = left, left_scale, right, right_scale
    expected = mm_blocks(*arguments, torch.float32)
    assert expected.isfinite().all() and expected.norm() > 0
    for kernel, error in (("blockwise", 1e-5), ("bf16", 1e-2)):
        monkeypatch.setattr(float8_blocks, "choose_kernel", lambda *described, kernel=kernel: kernel)
        with Cublas() as cublas:
            found = float8_blocks._run(*arguments, dtype)
        assert cublas.calls == (kernel == "blockwise") and found.dtype == dtype and found.is_contiguous()
        assert (found.float() - expected).norm() <= (error + torch.finfo(dtype).eps) * expected.norm()


@pytest.mark.parametrize("pair", ["input", "weight"])
@pytest.mark.parametrize("blocks", [1, 3, 4, 5])
def test_pytorch_accepts_the_layouts(pair: str, blocks: int) -> None:
    """Its rules for fake tensors of a GPU, which say what the operator checks there."""
    (left, right), k = PAIRS[pair], 128 * blocks
    scales = [(rows // block[0], blocks) for rows, block in ((32, left), (256, right))]
    with FakeTensorMode():
        a, b = (torch.empty(rows, k, device="cuda").to(E4M3) for rows in (32, 256))
        a_scale, b_scale = (torch.empty(scale, device="cuda") for scale in scales)
        turned = torch.empty(scales[1][::-1], device="cuda").t()
        for scale in (b_scale, turned):  # of a weight, and of one that is transposed
            found = float8_blocks._run_blockwise(a, a_scale, b, scale, torch.bfloat16)
            assert (found.shape, found.dtype, found.device.type) == ((32, 256), torch.bfloat16, "cuda")
