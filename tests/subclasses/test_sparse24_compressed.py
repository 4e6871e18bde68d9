"""cuSPARSELt's form of a matrix is made once for those that come again, and for no others kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import aotdist
from aotdist.subclasses import sparse24_compressed, sparse24_operators
from aotdist.subclasses.sparse24 import Sparse24Tensor
from aotdist.subclasses.sparse24_selection import sparsify


def multiply(
    compressed: torch.Tensor,
    dense: torch.Tensor,
    bias: torch.Tensor | None = None,
    alpha: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    transpose_result: bool = False,
    *algorithm: int,
) -> torch.Tensor:
    product = compressed @ dense if bias is None else compressed @ dense + bias[:, None]
    return product.t().contiguous() if transpose_result else product


@pytest.fixture
def compressions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    """A CPU with a kernel of cuSPARSELt's; sizes of what was compressed."""
    done: list[torch.Size] = []

    def compress(dense: torch.Tensor) -> torch.Tensor:
        done.append(dense.shape)
        return dense.clone()

    monkeypatch.setattr(sparse24_operators, "choose_kernel", lambda *described: "cusparselt")
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_cslt_compress", compress, "CPU")
        library.impl("_cslt_sparse_mm", multiply, "CPU")
        yield done


PER_STEP: dict[str, tuple[dict[str, Any], list[int]]] = {
    "chosen in each forward": ({}, [1, 1, 1, 1]),
    "held": ({"select": "held"}, [1, 1, 1, 1]),
    "transposable": ({"mask": "transposable"}, [2, 2, 2, 2]),  # W and W.T, for forward and backward
    "packed": ({"select": "packed"}, [1, 1, 0, 0]),
    "packed, transposable": ({"select": "packed", "mask": "transposable"}, [2, 2, 0, 0]),
    "inputs": ({"operand": "input"}, [1, 1, 1, 1]),
}


@pytest.mark.parametrize("options, counts", PER_STEP.values(), ids=PER_STEP.keys())
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_compresses_once(
    compressions: list[torch.Size], options: dict[str, Any], counts: list[int], is_compiled: bool
) -> None:
    layer = nn.Linear(32, 64)
    aotdist.sparsify_24(layer, **options)
    model = aotdist.compile(layer, backend="fx") if is_compiled else layer
    optimizer = torch.optim.SGD([param for param in layer.parameters() if param.requires_grad], 0.1)
    found: list[int] = []
    for _ in counts:
        compressions.clear()
        x = torch.randn(8, 32, requires_grad=True)
        model(x).square().sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()
        optimizer.step()
        found.append(len(compressions))
    assert found == counts


def write_through_a_wrapper(sparse: Sparse24Tensor) -> None:
    sparse.detach().copy_(sparsify(torch.randn(64, 32)))  # as a checkpoint is loaded


def write_metadata(sparse: Sparse24Tensor) -> None:
    sparse.parts()["meta"].copy_(sparsify(torch.randn(64, 32)).parts()["meta"])


def gather_anew(sparse: Sparse24Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(sparse.parts()["packed"]):  # as FSDP2 does
        sparse.parts()["packed"].mul_(2)
    sparse.fsdp_post_all_gather(tuple(sparse.parts().values()), False, torch.float32, out=sparse)


@pytest.mark.parametrize("write", [write_through_a_wrapper, write_metadata, gather_anew])
def test_a_form_is_that_of_the_values_that_are_there(
    compressions: list[torch.Size], write: Callable[[Sparse24Tensor], None]
) -> None:
    sparse, x = sparsify(torch.randn(64, 32)), torch.randn(8, 32)

    def product(of: Sparse24Tensor = sparse) -> int:
        before = len(compressions)
        assert torch.equal(F.linear(x, of), F.linear(x, of.to_dense()))
        return len(compressions) - before

    assert [product() for _ in range(4)] == [1, 1, 0, 0]
    write(sparse)
    assert [product() for _ in range(4)] == [1, 1, 0, 0]
    assert product(Sparse24Tensor(sparse.packed, sparsify(torch.randn(64, 32)).meta)) == 1


def test_it_is_let_go_with_its_matrix(compressions: list[torch.Size]) -> None:
    kept = len(sparse24_compressed._seen)
    sparse, x = sparsify(torch.randn(64, 32)), torch.randn(8, 32)
    for _ in range(2):
        F.linear(x, sparse)
    assert len(sparse24_compressed._seen) == kept + 1
    del sparse
    assert len(sparse24_compressed._seen) == kept
    with torch.inference_mode():  # no version would say what is written
        sparse = sparsify(torch.randn(64, 32))
        assert torch.equal(F.linear(x, sparse), F.linear(x, sparse.to_dense()))
    assert len(sparse24_compressed._seen) == kept
