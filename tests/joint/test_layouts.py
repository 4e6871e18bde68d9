"""Results lie in memory where the trace says that they do."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import aotdist

SHAPES = ((2, 3, 4), (2, 3, 4, 5), (2, 3, 1, 1), (2, 3, 2, 2, 2))
LAYOUTS = [(shape, order) for shape in SHAPES for order in itertools.permutations(range(len(shape)))]


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
@pytest.mark.parametrize("num_dims", [3, 4, 5])
def test_a_batch_norm_of_a_permuted_tensor(num_dims: int, training: bool) -> None:
    norms = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    for shape, order in LAYOUTS:
        if len(shape) != num_dims or order == tuple(range(num_dims)):
            continue
        found = []
        for compiles in (False, True):
            norm = norms[num_dims](shape[1]).train(training)

            def call(x: torch.Tensor, norm: nn.Module = norm) -> torch.Tensor:
                return norm(x * 2).movedim(1, -1).reshape(-1, 3) * 2

            found.append(
                seen(aotdist.compile(call, backend="fx") if compiles else call, norm, lying(shape, order))
            )
        for eager, ours in zip(*found, strict=True):
            assert torch.equal(eager, ours) and eager.stride() == ours.stride(), (shape, order)


def test_what_a_batch_norm_gives_is_copied_where_eager_copies_it() -> None:
    norm = nn.BatchNorm1d(4)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return norm(x.transpose(1, 2)).transpose(1, 2).reshape(-1, 4)

    x = torch.randn(2, 8, 4)
    eager, ours = rows(x), aotdist.compile(rows, backend="fx")(x)
    assert torch.equal(eager, ours) and eager._is_view() == ours._is_view()
