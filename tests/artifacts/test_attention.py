"""Programs for GPUs: the attention that the target chooses, and the dtypes and strides that it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.joint.attention import chosen_for
from aotdist.store.build import compiled_ahead
from aotdist.torch_seam import ambient
from aotdist.torch_seam.functional import FakeTensorMode
from tests.artifacts.interpreting import interpret
from tests.artifacts.programs import Made, decoder

FLASH, EFFICIENT, CUDNN = (
    f"aten._scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")
)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)
    _has_cudnn(monkeypatch, None)


def _has_cudnn(monkeypatch: pytest.MonkeyPatch, version: int | None) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)


def nodes(make: Callable[[], Made], target: str = "sm_90") -> Iterator[torch.fx.Node]:
    ((artifact,),) = compiled_ahead(make, target=target)
    for kind in ("forward", "backward"):
        yield from artifact.compilation.graphs()[kind].gm.graph.nodes


def attention_among(found: Iterator[torch.fx.Node]) -> list[str]:
    names = (str(node.target) for node in found)
    return [name.removesuffix(".default") for name in names if "dot_product" in name or "bmm" in name]


def heads(dtype: torch.dtype, dim: int = 16, key_heads: int = 4) -> list[Tensor]:
    """Shapes: (batch, heads, rows, dim) of query, key and value, in memory (batch, rows, heads, dim)."""
    sizes = ((2, 8, heads, dim) for heads in (4, key_heads, key_heads))
    return [torch.randn(size, dtype=dtype).transpose(1, 2).requires_grad_() for size in sizes]


def test_a_decoder_has_flash_attention_in_bf16_and_the_efficient_one_in_fp32() -> None:
    def in_bf16() -> Made:
        model, args = decoder()
        return model.to(BF16), args

    assert attention_among(nodes(in_bf16)) == [FLASH] * 2 + [f"{FLASH}_backward"] * 2
    assert attention_among(nodes(decoder)) == [EFFICIENT] * 2 + [f"{EFFICIENT}_backward"] * 2
    assert not any("dot_product" in name for name in attention_among(nodes(decoder, "gfx942")))


MASK = torch.ones(8, 8, dtype=torch.bool).tril()
CHOICES: dict[str, tuple[str | None, torch.dtype, dict[str, int], dict[str, Any]]] = {
    "half": (FLASH, BF16, {}, {}),
    "causal": (FLASH, BF16, {}, {"is_causal": True, "scale": 0.5}),
    "single": (EFFICIENT, FP32, {}, {}),
    "a mask": (EFFICIENT, BF16, {}, {"attn_mask": MASK}),
    "a mask to add": (EFFICIENT, FP32, {}, {"attn_mask": torch.randn(2, 1, 8, 8)}),
    "a mask in rows of no multiple of 8": (EFFICIENT, FP32, {}, {"attn_mask": torch.randn(8, 9)[:, :8]}),
    "shared keys": (FLASH, BF16, {"key_heads": 2}, {"enable_gqa": True}),
    "shared keys, single": (EFFICIENT, FP32, {"key_heads": 2}, {"enable_gqa": True}),
    "heads that are filled up": (FLASH, BF16, {"dim": 12}, {"is_causal": True}),
    "heads that no kernel takes": (None, FP32, {"dim": 3}, {}),
    "long heads": (EFFICIENT, BF16, {"dim": 264}, {}),
    "double": (None, torch.float64, {}, {}),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_kernel_that_the_target_chooses_gives_what_the_formula_gives(name: str) -> None:
    chosen, dtype, sizes, options = CHOICES[name]
    inputs = heads(dtype, **sizes)
    with sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(*inputs, **options)
    grads = torch.autograd.grad(expected.float().square().sum(), inputs)
    called: list[str] = []

    class Hearing(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func).removesuffix(".default"))
            return func(*args, **(kwargs or {}))

    with chosen_for("sm_90"), Hearing():
        found = torch.nn.functional.scaled_dot_product_attention(*inputs, **options)
        found_grads = torch.autograd.grad(found.float().square().sum(), inputs)
    assert [each for each in called if "dot_product" in each and "backward" not in each] == (
        [] if chosen is None else [chosen]
    )
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype is BF16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close([found, *found_grads], [expected, *grads], **close)


def test_cudnn_is_first_where_pytorch_prefers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ambient.attention_kernels
    assert kernels("sm_90")[0] == SDPBackend.FLASH_ATTENTION
    _has_cudnn(monkeypatch, 91900)
    assert kernels("sm_90")[0] == SDPBackend.CUDNN_ATTENTION != kernels("sm_80")[0]
    with chosen_for("sm_90"), FakeTensorMode():
        result = torch.nn.functional.scaled_dot_product_attention(*heads(BF16), is_causal=True)
        assert result.grad_fn is not None and "Cudnn" in type(result.grad_fn).__name__
        assert result.stride() == (512, 16, 64, 1)
        wide = torch.nn.functional.scaled_dot_product_attention(*heads(BF16, 192))
        assert "Flash" in type(wide.grad_fn).__name__
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert kernels("sm_90") == [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def attend(self, x: Tensor) -> Tensor:
        y = self.linear(x).unflatten(-1, (4, 16)).transpose(1, 2)
        return scaled_dot_product_attention(y, y, y).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.attend, x, use_reentrant=False)


@pytest.mark.parametrize(
    "make", [Attending, lambda: nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True)]
)
def test_checkpoints_and_layers_of_pytorchs_have_it_too(make: Callable[[], nn.Module]) -> None:
    found = attention_among(nodes(lambda: (make(), (torch.randn(2, 8, 64),))))
    assert found == [EFFICIENT, f"{EFFICIENT}_backward"]


def test_no_kernel_is_an_error_that_says_so() -> None:
    def attend(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(x, x, x)

    with pytest.raises(aotdist.UnsupportedProgram, match="takes these arguments on sm_90"):
        compiled_ahead(lambda: (attend, (torch.randn(1, 1, 8, 8),)), target="sm_90")
