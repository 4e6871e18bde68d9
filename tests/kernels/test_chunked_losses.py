"""Losses by chunks as kernels: one a chunk, and no more logits at once than one chunk's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from aotdist.partition.traits import is_view
from aotdist.passes.linear_losses import WHOLE
from tests.kernels.reference import Emissions
from tests.passes.test_chunk_losses import (
    CLASSES,
    LEFT,
    LOSSES,
    ROWS,
    TOLERANCE,
    chunked,
    examples,
    mean,
    outcome,
)

NUM_CHUNKS = -(-ROWS // 16)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_and_its_gradients_are_eager_s(loss: Callable[..., Tensor], dtype: torch.dtype) -> None:
    args, compiled = examples(dtype), chunked(loss, 16 * CLASSES * dtype.itemsize, "triton")
    torch.testing.assert_close(outcome(compiled, args), outcome(loss, args), **TOLERANCE[dtype])


@pytest.mark.parametrize("loss", LEFT)
def test_losses_that_are_left_are_kernels_like_others(
    loss: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    emissions = Emissions(monkeypatch)
    args, compiled = examples(), chunked(loss, backend="triton")
    for ours, eager in zip(outcome(compiled, args), outcome(loss, args), strict=True):
        # Small elements are sums of large ones: they are as exact as the largest.
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-6 * float(eager.abs().max()))
    library = {node.target for made in emissions.made for node in made.reasons}
    assert library.isdisjoint(WHOLE)


def test_a_chunk_is_one_kernel_and_three_products(monkeypatch: pytest.MonkeyPatch) -> None:
    emissions = Emissions(monkeypatch)
    outcome(chunked(mean, backend="triton"), examples())
    forward, backward = emissions.made
    names = [node.name for node in forward.graph.gm.graph.nodes if node.op == "call_function"]
    kernels = [one.printed.name for one in forward.kernels]
    assert sum("gather" in name for name in kernels) == NUM_CHUNKS
    assert len(kernels) == NUM_CHUNKS + 2  # and one that sums up losses, one that puts rows together
    assert sum(name.startswith(("product_after", "wide_product", "add_product", "mm")) for name in names) == (
        3 * NUM_CHUNKS
    )
    assert not backward.reasons


def test_no_more_is_alive_of_the_logits_than_one_chunk_and_its_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emissions = Emissions(monkeypatch)
    outcome(chunked(mean, backend="triton"), examples())
    nodes = list(emissions.made[0].graph.gm.graph.nodes)
    of_logits = [node for node in nodes if is_as_wide_as_logits(node)]
    assert len(of_logits) == 2 * NUM_CHUNKS
    position = {node: at for at, node in enumerate(nodes)}
    last_use = {node: max(position[user] for user in node.users) for node in nodes if node.users}
    for node in of_logits:
        assert sum(position[one] <= position[node] <= last_use[one] for one in of_logits) <= 2


def is_as_wide_as_logits(node: Node) -> bool:
    """And takes memory: no view."""
    value = node.meta.get("val")
    is_new = node.op == "call_function" and not is_view(node)
    return is_new and isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] == CLASSES
