"""Inductor is told the strides that operators are bound to, of PyTorch's and of the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

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
