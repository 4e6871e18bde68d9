"""FP8 layers and 2:4 sparse tensors multiply on the GPU that is here, and are what they are on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.sparse import SparseSemiStructuredTensor

import aotdist
from aotdist.subclasses import float8_blocks, sparse24_compressed
from aotdist.subclasses.sparse24 import Sparse24Tensor
from aotdist.subclasses.sparse24_packing import MaskKind
from aotdist.subclasses.sparse24_selection import sparsify
from tests.subclasses.float8_models import RECIPES, batch, different, make, pair
from tests.subclasses.fsdp_models import same_bits
from tests.subclasses.test_sparse24_compressed import PER_STEP

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor:UserWarning"),
]

IN_SIXTEENS = {"tensorwise", "rowwise"}
"""Recipes of torchao that multiply the gradient of a weight in FP8, and fill nothing up: eager raises."""


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_in_float8(recipe: str, device: torch.device) -> None:
    """The kernels of a GPU add in another order than a CPU, so these two are close, not equal."""
    on_cpu, (eager, compiled) = make(recipe), (model.to(device) for model in pair(recipe))
    for step in range(3):
        losses = [model(batch(step).to(device)).square().mean() for model in (eager, compiled)]
        for loss in (*losses, on_cpu(batch(step)).square().mean()):
            loss.backward()
        assert same_bits(*losses) and not different(eager, compiled)
    torch.testing.assert_close(eager.up.weight.grad.cpu(), on_cpu.up.weight.grad, rtol=0.1, atol=1e-3)


def gradients(layer: nn.Linear, x: torch.Tensor, cotangent: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output of a layer, and what its two backward products give, on the CPU."""
    leaf = x.detach().to(layer.weight.device).requires_grad_()
    layer.zero_grad()
    output = layer(leaf)
    output.backward(cotangent.to(output.device))
    assert leaf.grad is not None and layer.weight.grad is not None
    found = {"output": output.detach(), "input": leaf.grad, "weight": layer.weight.grad}
    return {name: tensor.cpu().float() for name, tensor in found.items()}


@pytest.mark.parametrize("tokens", [256, 21])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_in_float8(recipe: str, dtype: torch.dtype, tokens: int, device: torch.device) -> None:
    """Those of a CPU, which multiplies in fp32 what the operands stand for: they are rounded alike."""
    torch.manual_seed(0)
    on_cpu = nn.Linear(640, 384, dtype=dtype)
    aotdist.to_float8(on_cpu, recipe)
    on_gpu = copy.deepcopy(on_cpu).to(device)
    if recipe not in ("delayed", "blockwise"):  # on a CPU, torchao emulates: that is settled when it converts
        on_gpu = nn.Linear(640, 384, dtype=dtype)
        on_gpu.load_state_dict(on_cpu.state_dict())
        aotdist.to_float8(on_gpu.to(device), recipe)
    for _ in range(2):
        x, cotangent = torch.randn(tokens, 640).to(dtype), torch.randn(tokens, 384).to(dtype)
        want = gradients(on_cpu, x, cotangent)
        if tokens % 16 and recipe in IN_SIXTEENS:
            with pytest.raises(RuntimeError, match="divisible by 16"):
                gradients(on_gpu, x, cotangent)
            continue
        got = gradients(on_gpu, x, cotangent)
        for name, tensor in want.items():
            assert got[name].isfinite().all() and tensor.norm() > 0, name
            assert (got[name] - tensor).norm() <= 1e-2 * tensor.norm(), name


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_blocks_have_their_kernel(
    is_compiled: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("cuBLAS multiplies blocks on compute capability 9.x alone")
    layer = nn.Linear(256, 384, device=device)
    aotdist.to_float8(layer, "blockwise")
    run, ran = float8_blocks._run_blockwise, list[torch.Size]()
    monkeypatch.setattr(
        float8_blocks, "_run_blockwise", lambda left, *rest: (ran.append(left.shape), run(left, *rest))[1]
    )
    model = aotdist.compile(layer, backend="fx") if is_compiled else layer
    model(torch.randn(32, 256, device=device, requires_grad=True)).sum().backward()
    assert [tuple(shape) for shape in ran] == [(32, 256), (32, 384), (384, 128)]


@pytest.mark.parametrize("options, counts", PER_STEP.values(), ids=PER_STEP.keys())
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_compresses_once(
    options: dict[str, Any],
    counts: list[int],
    is_compiled: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And multiplies as a GPU does that has no kernel for 2:4."""
    if torch.cuda.get_device_capability()[0] < 9 or not torch.backends.cusparselt.is_available():
        pytest.skip("cuSPARSELt is chosen from compute capability 9.0 on")
    compress, done = sparse24_compressed._compress, list[torch.Size]()
    monkeypatch.setattr(
        sparse24_compressed,
        "_compress",
        lambda packed, meta: (done.append(packed.shape), compress(packed, meta))[1],
    )
    layer = nn.Linear(128, 64, dtype=torch.bfloat16)
    aotdist.sparsify_24(layer, **options)
    on_cpu, layer = copy.deepcopy(layer), layer.to(device)
    model = aotdist.compile(layer, backend="fx") if is_compiled else layer
    for count in counts:
        done.clear()
        x = torch.randn(32, 128).bfloat16()
        ours, theirs = (x.detach().to(where).requires_grad_() for where in (device, "cpu"))
        output = model(ours)
        output.square().mean().backward()
        assert len(done) == count
        expected = on_cpu(theirs)
        expected.square().mean().backward()
        assert ours.grad is not None and theirs.grad is not None
        for got, want in ((output, expected), (ours.grad, theirs.grad)):
            assert want.norm() > 0 and (got.cpu() - want).norm() <= 1e-2 * want.norm()


@pytest.mark.parametrize("backend", ["cutlass", "cusparselt"])
def test_sparse_tensors_to_and_from_pytorch(backend: str, device: torch.device) -> None:
    sparse = sparsify(torch.randn(64, 128, dtype=torch.bfloat16, device=device))
    theirs = sparse.to_semi_structured(backend)
    assert isinstance(theirs, SparseSemiStructuredTensor)
    assert torch.equal(Sparse24Tensor.from_semi_structured(theirs).to_dense(), sparse.to_dense())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", ["row", "transposable"])
def test_sparse_products(mask: MaskKind, dtype: torch.dtype, device: torch.device) -> None:
    weight = torch.randn(64, 128, dtype=dtype, device=device)
    x, bias = torch.randn(32, 128, dtype=dtype, device=device), torch.randn(64, dtype=dtype, device=device)
    sparse = sparsify(weight, mask)
    dense = sparse.to_dense()
    torch.testing.assert_close(F.linear(x, sparse, bias), F.linear(x, dense, bias), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(sparse @ x.t(), dense @ x.t(), rtol=2e-2, atol=2e-2)
