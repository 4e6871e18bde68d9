"""Programs for GPUs: the attention that the target chooses, and the dtypes and strides that it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.artifacts.build import compiled_ahead
from aotdist.torch_seam import ambient
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.modes import TorchDispatchMode
from aotdist.trace.operators.attention import chosen_for
from tests.artifacts.attention import BF16, CHOICES, EFFICIENT, FLASH, heads
from tests.artifacts.interpreting import interpret
from tests.artifacts.programs import Made, decoder


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch)


def nodes(make: Callable[[], Made], target: str = "sm_90") -> Iterator[torch.fx.Node]:
    ((artifact,),) = compiled_ahead(make, target=target)
    for kind in ("forward", "backward"):
        yield from artifact.compilation.graphs()[kind].gm.graph.nodes


def attention_among(found: Iterator[torch.fx.Node]) -> list[str]:
    names = (str(node.target) for node in found)
    return [name.removesuffix(".default") for name in names if "dot_product" in name or "bmm" in name]


def test_a_decoder_in_bf16_has_flash_attention() -> None:
    def in_bf16() -> Made:
        model, args = decoder()
        return model.to(BF16), args

    def attending() -> Made:
        return Attending(), (torch.randn(2, 8, 64),)

    assert attention_among(nodes(in_bf16)) == [FLASH] * 2 + [f"{FLASH}_backward"] * 2
    assert not any("dot_product" in name for name in attention_among(nodes(attending, "gfx942")))


@pytest.mark.parametrize("name", CHOICES)
def test_the_kernel_that_the_target_chooses_gives_what_the_formula_gives(name: str) -> None:
    chosen, dtype, sizes, options = CHOICES[name]
    inputs = heads(dtype, **sizes)
    with sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(*inputs, **options)
    grads = torch.autograd.grad(expected.float().square().sum(), inputs)
    called: list[str] = []

    class Hearing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(str(func).removesuffix(".default"))
            return func(*args, **(kwargs or {}))

    with chosen_for("sm_90"), Hearing():
        found = torch.nn.functional.scaled_dot_product_attention(*inputs, **options)
        found_grads = torch.autograd.grad(found.float().square().sum(), inputs)
    assert [each for each in called if "dot_product" in each and "backward" not in each] == (
        [] if chosen is None else [chosen]
    )
    close: dict[str, Any] = {"rtol": 2e-2, "atol": 2e-2} if dtype is BF16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close([found, *found_grads], [expected, *grads], **close)


def test_cudnn_is_chosen_where_the_program_puts_it_first() -> None:
    kernels = ambient.attention_kernels
    assert kernels()[0] == SDPBackend.FLASH_ATTENTION
    ordered = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel(ordered, set_priority=True), chosen_for("sm_90"), FakeTensorMode():
        assert kernels() == ordered
        result = torch.nn.functional.scaled_dot_product_attention(*heads(BF16), is_causal=True)
        assert result.grad_fn is not None and "Cudnn" in type(result.grad_fn).__name__
        assert result.stride() == (512, 16, 64, 1)
        wide = torch.nn.functional.scaled_dot_product_attention(*heads(BF16, 192))
        assert "Flash" in type(wide.grad_fn).__name__


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
    ("make", "times"),
    [
        (Attending, 2),  # once more in the backward
        (lambda: nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True), 1),
    ],
)
def test_checkpoints_and_layers_of_pytorchs_have_it_too(make: Callable[[], nn.Module], times: int) -> None:
    found = attention_among(nodes(lambda: (make(), (torch.randn(2, 8, 64),))))
    assert found == [EFFICIENT] * times + [f"{EFFICIENT}_backward"]


def test_an_artifact_with_flash_attention_comes_back(tmp_path: Path) -> None:
    def make() -> Made:
        torch.manual_seed(0)
        return Attending().to(BF16), (torch.randn(2, 8, 64, dtype=BF16),)

    aotdist.build(make, tmp_path / "it.aot", target="sm_90")
    (eager, args), (loaded, _) = make(), make()
    aotdist.load(tmp_path / "it.aot", loaded)
    results = [model(*args) for model in (eager, loaded)]
    for result in results:
        result.float().square().mean().backward()
    grads = [[parameter.grad for parameter in model.parameters()] for model in (eager, loaded)]
    torch.testing.assert_close([results[1], *grads[1]], [results[0], *grads[0]], rtol=2e-2, atol=2e-3)


def test_layer_norms_keep_statistics_in_float32() -> None:
    def make() -> Made:
        norm = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).to(BF16)
        return norm, (torch.randn(4, 8, dtype=BF16),)

    values = [node.meta["val"] for node in nodes(make) if "val" in node.meta]
    statistics = [value.dtype for value in values if isinstance(value, Tensor) and value.shape == (4, 1)]
    assert set(statistics) == {torch.float32}


def test_no_kernel_is_an_error_that_says_so() -> None:
    def attend(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(x, x, x)

    with pytest.raises(aotdist.UnsupportedProgram, match="takes these arguments on sm_90"):
        compiled_ahead(lambda: (attend, (torch.randn(1, 1, 8, 8),)), target="sm_90")
