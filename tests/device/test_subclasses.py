"""FP8 layers and 2:4 sparse tensors multiply on the GPU that is here, and are what they are on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.sparse import SparseSemiStructuredTensor

from aotdist.subclasses.sparse24 import Sparse24Tensor
from aotdist.subclasses.sparse24_packing import MaskKind
from aotdist.subclasses.sparse24_selection import sparsify
from tests.subclasses.float8_models import RECIPES, batch, different, make, pair
from tests.subclasses.fsdp_models import same_bits

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor:UserWarning"),
]


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
