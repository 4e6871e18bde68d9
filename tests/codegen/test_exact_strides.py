"""Inductor is told the strides that operators are bound to, of PyTorch's and of the user's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aotdist
from aotdist.codegen import inductor
from aotdist.torch_seam.inductor import EAGER_ARGUMENTS


@torch.library.custom_op("aotdist_tests::in_memory_order", mutates_args=())
def in_memory_order(x: Tensor) -> Tensor:
    return x.as_strided((x.numel(),), (1,), x.storage_offset()).clone()


@in_memory_order.register_fake
def _fake(x: Tensor) -> Tensor:
    return x.new_empty((x.numel(),))


def by_columns(x: Tensor) -> Tensor:
    return in_memory_order((x * 2).t().contiguous().t()) + x.sum()


def test_strides_of_arguments_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    compiling = inductor.compile_with_inductor

    def watched(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        told.update(
            {str(n.target): n.meta[EAGER_ARGUMENTS] for n in gm.graph.nodes if EAGER_ARGUMENTS in n.meta}
        )
        return compiling(gm, *args, **kwargs)

    monkeypatch.setattr(inductor, "compile_with_inductor", watched)
    x = torch.randn(3, 4)
    torch.testing.assert_close(aotdist.compile(by_columns, backend="inductor")(x), by_columns(x))
    assert list(told) == ["aotdist_tests.in_memory_order.default"]  # and no operator that takes any
    ((argument,), _) = told["aotdist_tests.in_memory_order.default"]
    assert argument.stride() == (1, 3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("backend", ["inductor", "triton"])
def test_batch_norms_lie_as_in_eager(backend: Any, training: bool) -> None:
    """They lie otherwise than a transposed input: views take them, and dropout draws in their order."""
    norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2)).train(training)
    expected = copy.deepcopy(norms)

    def program(norms: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
        y = norms[0](x.transpose(1, 2))
        dropped = F.dropout(y.transpose(1, 2), 0.5)
        return y.view(2, -1), norms[1](dropped.transpose(1, 2))

    def run(call: Any, norms: nn.ModuleList) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(2, 5, 8, requires_grad=True)
        first, second = call(norms, x)
        (first.square().sum() + (second * torch.arange(5.0)).sum()).backward()
        assert x.grad is not None
        return [first, second, x.grad, *norms.buffers()]

    ours = run(aotdist.compile(program, backend=backend), norms)
    eager = run(program, expected)
    assert [one.stride() for one in ours] == [other.stride() for other in eager]
    for one, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
