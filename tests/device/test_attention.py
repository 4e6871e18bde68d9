"""Attention of artifacts is that of the GPU that is here: its choice of kernel, strides, eager's results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention

import aotdist
from aotdist.artifacts.build import KNOWN_TARGETS
from aotdist.artifacts.load import gpu_here
from aotdist.torch_seam.functional import FakeTensorMode
from aotdist.torch_seam.modes import TorchDispatchMode
from aotdist.torch_seam.trees import pytree
from aotdist.trace.operators.attention import chosen_for
from tests.artifacts.attention import CHOICES, heads

pytestmark = pytest.mark.device
CHOICE_OF_TORCH: Any = vars(torch)["_fused_sdp_choice"]
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
WIDER_THAN_SOME_RELEASES = {"shared keys, single"}


@pytest.fixture
def target() -> str:
    found = gpu_here()
    if found not in KNOWN_TARGETS or not found.startswith("sm_"):
        pytest.skip(f"no artifacts with attention are built for {found}")
    return found


class Calls(TorchDispatchMode):
    """The operators of attention that are called, and their results, as far as a kernel reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()
        self.strides = list[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if "_scaled_dot_product_" in str(func):
            self.names.append(str(func))
            tensors = (x for x in pytree.tree_leaves(results) if isinstance(x, Tensor))
            self.strides.append([(x.dtype, x.shape, x.stride()) for x in tensors if x.dim() > 2])
        return results


def options_on(device: torch.device, options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each.to(device) if isinstance(each, Tensor) else each for name, each in options.items()}


@pytest.mark.parametrize("name", CHOICES)
def test_kernel_and_strides_are_those_of_the_gpu(name: str, target: str, device: torch.device) -> None:
    _, dtype, sizes, options = CHOICES[name]

    def run(on: torch.device) -> tuple[Calls, list[Tensor]]:
        inputs = [x.detach().to(on).requires_grad_() for x in heads(dtype, **sizes)]
        given = options_on(on, options)
        # PyTorch puts cuDNN's kernel first, where it does, when it is first asked to choose for a GPU.
        by_torch = SDPBackend(CHOICE_OF_TORCH(*inputs, **given)) if on.type == "cuda" else None
        with chosen_for(target), Calls() as calls:
            result = torch.nn.functional.scaled_dot_product_attention(*inputs, **given)
            grads = torch.autograd.grad(result.float().square().sum(), inputs)
        if by_torch is not None and name not in WIDER_THAN_SOME_RELEASES:
            ours = [kind for kind in BACKENDS if any(f"product_{kind}_" in each for each in calls.names)]
            assert by_torch in (BACKENDS[ours[0]] if ours else SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION)
        return calls, [result, *grads]

    torch.manual_seed(0)
    calls, results = run(device)
    torch.manual_seed(0)
    with FakeTensorMode(allow_non_fake_inputs=True):
        traced, _ = run(torch.device("cpu"))
    assert (traced.names, traced.strides) == (calls.names, calls.strides)
    torch.manual_seed(0)
    inputs = [x.detach().to(device).float().requires_grad_() for x in heads(dtype, **sizes)]
    given = options_on(device, options)
    expected = scaled_dot_product_attention(*inputs, **given)
    grads = torch.autograd.grad(expected.square().sum(), inputs)
    near = 3e-2 if dtype is torch.bfloat16 else 2e-3
    for found, wanted in zip(results, [expected, *grads], strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=near, atol=near)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(256), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x)).unflatten(-1, (4, 64)).transpose(1, 2)
        return scaled_dot_product_attention(y, y, y, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_artifact_is_as_eager(
    dtype: torch.dtype, target: str, device: torch.device, tmp_path: Path
) -> None:
    def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        return Attending().to(dtype), (torch.randn(2, 128, 256, dtype=dtype),)

    aotdist.build(make, tmp_path / "it.aot", target=target)
    models = [make()[0].to(device) for _ in range(2)]
    aotdist.load(tmp_path / "it.aot", models[1])
    steps = list[list[Any]]()
    for model in models:
        result = model(make()[1][0].to(device))
        result.float().square().mean().backward()
        steps.append([result, *(parameter.grad for parameter in model.parameters())])
    near = 3e-2 if dtype is torch.bfloat16 else 2e-3
    for expected, found in zip(*steps, strict=True):
        torch.testing.assert_close(found, expected, rtol=near, atol=near / 10)
