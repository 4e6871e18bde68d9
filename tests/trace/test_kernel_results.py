"""Results lie in memory where the trace says that they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aotdist

LAYOUTS = [
    ((2, 3, 4), (0, 2, 1)),
    ((2, 3, 4), (1, 2, 0)),
    ((2, 3, 4, 5), (0, 2, 3, 1)),
    ((2, 3, 4, 5), (3, 1, 0, 2)),
    ((2, 3, 1, 1), (0, 3, 2, 1)),
    ((2, 1, 4, 5), (0, 2, 3, 1)),
    ((2, 3, 2, 4, 3), (0, 2, 3, 4, 1)),
    ((2, 3, 2, 4, 3), (0, 4, 1, 2, 3)),
]
"""Shapes, and their dimensions as they lie in memory."""


def lying(shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """A tensor of that shape whose dimensions lie in memory in that order."""
    torch.manual_seed(0)
    made = torch.randn([shape[dim] for dim in order])
    return made.permute([order.index(dim) for dim in range(len(shape))]).requires_grad_()


def seen(
    call: Callable[[torch.Tensor], torch.Tensor], norm: nn.Module, x: torch.Tensor
) -> list[torch.Tensor]:
    """What a call and its backward leave behind."""
    y = call(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape))
    grads = [parameter.grad for parameter in norm.parameters()]
    return [y.detach(), *(grad for grad in (x.grad, *grads) if grad is not None), *norm.buffers()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("shape", "order"), LAYOUTS)
def test_a_batch_norm_of_a_permuted_tensor(
    shape: tuple[int, ...], order: tuple[int, ...], training: bool
) -> None:
    make = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    found = []
    for compiles in (False, True):
        norm = make(shape[1]).train(training)

        def rows(x: torch.Tensor, norm: nn.Module = norm) -> torch.Tensor:
            return norm(x * 2).movedim(1, -1).reshape(-1, shape[1]) * 2

        call = aotdist.compile(rows, backend="fx") if compiles else rows
        found.append(seen(call, norm, lying(shape, order)))
    for eager, ours in zip(*found, strict=True):
        assert torch.equal(eager, ours) and eager.stride() == ours.stride()


GROUPED = {
    "rows": lambda: (torch.randn(8, 16), torch.randn(2, 16, 8)),
    "rows of transposed": lambda: (torch.randn(8, 16), torch.randn(2, 6, 16).mT),
    "columns": lambda: (torch.randn(2, 4, 16), torch.randn(8, 16).t()),
    "sums": lambda: (torch.randn(8, 16).t(), torch.randn(8, 8)),
    "batches": lambda: (torch.randn(2, 4, 8), torch.randn(2, 8, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", GROUPED)
def test_a_grouped_product(kind: str, dtype: torch.dtype) -> None:
    offsets = None if kind == "batches" else torch.tensor([3, 8], dtype=torch.int32)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch._grouped_mm(a, b, offs=offsets)

    torch.manual_seed(0)
    a, b = (each.to(dtype) for each in GROUPED[kind]())
    eager = product(a, b)
    ours = aotdist.compile(product, backend="fx")(a, b)
    assert torch.equal(eager, ours) and eager.stride() == ours.stride()


def test_experts_learn_in_float32() -> None:
    offsets = torch.tensor([3, 8], dtype=torch.int32)

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = torch._grouped_mm(x, weight, offs=offsets).relu()
        return torch._grouped_mm(hidden, weight.mT, offs=offsets).square().mean()

    torch.manual_seed(0)
    found = []
    for function in (loss, aotdist.compile(loss, backend="fx")):
        torch.manual_seed(0)
        arguments = [torch.randn(8, 16, requires_grad=True), torch.randn(2, 16, 8, requires_grad=True)]
        value = function(*arguments)
        found.append([value.detach(), *torch.autograd.grad(value, arguments)])
    assert all(map(torch.equal, *found))


def test_what_a_batch_norm_gives_is_copied_where_eager_copies_it() -> None:
    norm = nn.BatchNorm1d(4)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return norm(x.transpose(1, 2)).transpose(1, 2).reshape(-1, 4)

    x = torch.randn(2, 8, 4)
    eager, ours = rows(x), aotdist.compile(rows, backend="fx")(x)
    assert torch.equal(eager, ours) and eager._is_view() == ours._is_view()


@pytest.mark.parametrize("sparse", [True, False])
def test_bags_of_weighted_rows(sparse: bool) -> None:
    indices, offsets = torch.tensor([1, 2, 4, 4]), torch.tensor([0, 2])

    def sums(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(
            indices, rows, offsets, mode="sum", sparse=sparse, per_sample_weights=weights
        ).square()

    found = []
    for function in (sums, aotdist.compile(sums, backend="fx")):
        torch.manual_seed(0)
        arguments = [torch.randn(6, 3, requires_grad=True), torch.randn(4, requires_grad=True)]
        value = function(*arguments)
        value.sum().backward()
        assert arguments[0].grad is not None and arguments[0].grad.is_sparse == sparse
        found.append([value.detach(), arguments[0].grad.to_dense(), arguments[1].grad])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_cannot_be_a_view_is_refused_as_in_eager(dynamic: bool) -> None:
    said: list[str] = []

    def rows(x: torch.Tensor) -> torch.Tensor:
        try:
            return x.mT.view(-1, 2) * 2
        except RuntimeError as error:
            said.append(str(error))
            return x.mT.reshape(-1, 2) * 3

    x = torch.randn(2, 3, 4)
    ours = aotdist.compile(rows, backend="fx", settings={"dynamic": dynamic})
    assert torch.equal(rows(x), ours(x)) and len(set(said)) == 1
