"""Losses by chunks: what they come to, what is left as it is, and how much of the logits is ever there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import aotdist
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.passes.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from aotdist.report.profile import MIB, most_allocated_by
from aotdist.settings import Settings

ROWS, FEATURES, CLASSES = 60, 24, 200
TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-6},
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    # The gradients of logits are rounded before what arrives is multiplied, and once more afterwards.
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-3},
    torch.float16: {"rtol": 2e-3, "atol": 2e-4},
}
"""How far a loss by chunks may be from eager's."""


def widened(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def mean(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), labels)


def summed(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(widened(F.linear(x, w)), labels, reduction="sum") / 32


def ignored(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), labels.where(labels % 3 != 0, 7), ignore_index=7) * 2


def shifted_labels(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """As transformers does."""
    logits = widened(F.linear(x.view(4, ROWS // 4, -1), w))
    labels = F.pad(labels.view(4, -1), (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))


def shifted_logits(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x.view(4, ROWS // 4, -1), w)[:, :-1].reshape(-1, CLASSES)
    return F.cross_entropy(widened(logits), labels.view(4, -1)[:, 1:].reshape(-1))


def of_a_slice(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w)[4:20], labels[4:20])


LOSSES = (mean, summed, ignored, shifted_labels, shifted_logits, of_a_slice)


def examples(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    x, w = torch.randn(ROWS, FEATURES), torch.randn(CLASSES, FEATURES)
    return [
        x.to(dtype).requires_grad_(),
        w.to(dtype).requires_grad_(),
        torch.randint(0, CLASSES, (ROWS,)),
    ]


def chunked(program: Callable[..., Any], num_bytes: int = 16 * CLASSES * 4, backend: str = "fx") -> Any:
    return aotdist.compile(program, backend=backend, settings={"loss_chunk_bytes": num_bytes})


def outcome(program: Callable[..., Tensor], args: Sequence[Tensor], arriving: float = 3.0) -> list[Tensor]:
    loss = program(*args)
    wanted = [arg for arg in args if arg.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, wanted, torch.full_like(loss, arriving))]


def is_chunked(compiled: Any) -> bool:
    (graphs,) = compiled.graphs
    return any(node.target is LINEAR_CROSS_ENTROPY for gm in graphs.values() for node in gm.graph.nodes)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_and_its_gradients_are_eager_s(loss: Callable[..., Tensor], dtype: torch.dtype) -> None:
    args = examples(dtype)
    compiled = chunked(loss)
    torch.testing.assert_close(outcome(compiled, args), outcome(loss, args), **TOLERANCE[dtype])
    assert is_chunked(compiled)


def test_what_is_summed_up_does_not_depend_on_the_run() -> None:
    compiled, args = chunked(mean), examples(torch.bfloat16)
    first, second = outcome(compiled, args), outcome(compiled, args)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("frozen", (0, 1))
def test_only_gradients_that_are_wanted_are_computed(frozen: int) -> None:
    args = examples()
    args[frozen] = args[frozen].detach()
    compiled = chunked(mean)
    torch.testing.assert_close(outcome(compiled, args), outcome(mean, args), **TOLERANCE[torch.float32])
    (graphs,) = compiled.graphs
    (node,) = graphs["joint"].graph.find_nodes(op="call_function", target=LINEAR_CROSS_ENTROPY)
    assert list(node.args[-2:]) == [frozen != 0, frozen != 1]


def test_without_gradients_only_the_loss_is_computed() -> None:
    args = [arg.detach() for arg in examples()]
    compiled = chunked(mean)
    torch.testing.assert_close(compiled(*args), mean(*args), **TOLERANCE[torch.float32])
    assert is_chunked(compiled)


def test_labels_that_all_rows_ignore_give_what_eager_gives() -> None:
    x, w, labels = examples()
    args = [x, w, torch.full_like(labels, -100)]
    torch.testing.assert_close(outcome(chunked(mean), args), outcome(mean, args), equal_nan=True)


def test_gradients_of_gradients_are_refused() -> None:
    """The forward has computed the gradients by then, and keeps nothing to compute them of again."""
    args = examples(torch.float64)
    loss = chunked(mean)(*args)
    with pytest.raises(UnsupportedProgram, match="which was not saved(.|\n)*create_graph=True"):
        torch.autograd.grad(loss, args[:1], create_graph=True)


def test_tied_weights_get_both_gradients() -> None:
    def tied(w: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(w[labels].tanh(), w), labels.roll(1))

    _, w, labels = examples()
    compiled = chunked(tied)
    torch.testing.assert_close(outcome(compiled, [w, labels]), outcome(tied, [w, labels]))
    assert is_chunked(compiled)


def also_returned(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, w)
    return F.cross_entropy(logits, labels) + logits.square().mean()


def with_class_weights(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), labels, weight=torch.ones(CLASSES))


def smoothed(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), labels, label_smoothing=0.1)


def with_bias(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w, w[:, 0]), labels)


def row_by_row(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w), labels, reduction="none").square().sum()


def soft_capped(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(30 * torch.tanh(F.linear(x, w) / 30), labels)


def classes_sliced(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w)[:, :100], labels % 100)


LEFT = (
    also_returned,
    with_class_weights,
    smoothed,
    with_bias,
    row_by_row,
    soft_capped,
    classes_sliced,
)


@pytest.mark.parametrize("loss", LEFT)
def test_other_losses_are_left_as_they_are(loss: Callable[..., Tensor]) -> None:
    args, compiled = examples(), chunked(loss)
    found, expected = outcome(compiled, args), outcome(loss, args)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert not is_chunked(compiled)


@pytest.mark.parametrize("num_bytes", (None, ROWS * CLASSES * 4))
def test_logits_that_may_be_there_at_once_are(num_bytes: int | None) -> None:
    args, compiled = examples(), chunked(mean, num_bytes)  # type: ignore[arg-type]
    assert torch.equal(compiled(*args), mean(*args))
    assert not is_chunked(compiled)


def test_a_step_holds_no_more_logits_than_it_may() -> None:
    args = [torch.randn(2048, 32), torch.randn(4096, 32), torch.randint(0, 4096, (2048,))]
    args = [arg.requires_grad_(arg.is_floating_point()) for arg in args]
    logits = 2048 * 4096 * 4 / MIB
    compiled = chunked(mean, int(logits / 32 * MIB))
    outcome(compiled, args)
    assert most_allocated_by(lambda: outcome(mean, args)) > 2 * logits
    # The logits of a chunk, what is made of them on the way in float32, and gradients of the layer.
    assert most_allocated_by(lambda: outcome(compiled, args)) < logits / 4


def test_whole_training_steps_have_it_too() -> None:
    def loss_of(model: nn.Module, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(labels), labels.roll(1))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(CLASSES, FEATURES), nn.Linear(FEATURES, CLASSES, bias=False))
    losses = []
    for num_bytes in (None, 16 * CLASSES * 4):
        own = copy.deepcopy(model)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        settings = {"loss_chunk_bytes": num_bytes}
        step = aotdist.train_step(own, loss_of, optimizer, backend="fx", settings=settings)
        losses.append([step(examples()[2]).item() for _ in range(3)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[1][2] < losses[1][0]
    assert is_chunked(step)


@pytest.mark.parametrize("loss", (mean, also_returned))
def test_symbolic_sizes_leave_losses_as_they_are(loss: Callable[..., Tensor]) -> None:
    settings = {"loss_chunk_bytes": 16 * CLASSES, "dynamic": True}
    args, compiled = examples(), aotdist.compile(loss, backend="inductor", settings=settings)
    for num_rows in (ROWS, ROWS - 7):
        own = [args[0].detach()[:num_rows].requires_grad_(), args[1], args[2][:num_rows]]
        torch.testing.assert_close(outcome(compiled, own), outcome(loss, own), rtol=1e-4, atol=1e-5)
    assert not is_chunked(compiled)


def test_inductor_runs_it_too() -> None:
    args, compiled = examples(), chunked(shifted_labels, backend="inductor")
    found, expected = outcome(compiled, args), outcome(shifted_labels, args)
    torch.testing.assert_close(found, expected, **TOLERANCE[torch.float32])
    assert is_chunked(compiled)


def test_no_bytes_are_no_chunk() -> None:
    with pytest.raises(BadSettings, match="loss_chunk_bytes is 0"):
        Settings(loss_chunk_bytes=0)
