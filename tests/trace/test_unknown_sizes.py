"""CTC losses and least squares: what they keep, or leave out, has a size that depends on data."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aotdist
from tests.semantics.observation import Scene, same_as_eager

NUMBERS: Any = (12, 3), (4, 2)
LENGTHS = torch.tensor(NUMBERS[0]), torch.tensor(NUMBERS[1])
TARGETS = {
    "in rows": lambda: torch.randint(1, 6, (2, 5)),
    "one after another": lambda: torch.randint(1, 6, (6,)),
}


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_lengths_may_be_numbers(reduction: str, targets: str) -> None:
    def program(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(-1), target, *NUMBERS, reduction=reduction, zero_infinity=True)

    same_as_eager(
        lambda: Scene(program, (torch.randn(12, 2, 6, requires_grad=True), TARGETS[targets]())), calls=2
    )


DRIVERS = ("gels", "gelsd", "gelss")
SHAPES = [((5, 3), (5, 2)), ((3, 5), (3, 2)), ((2, 5, 3), (2, 5, 2)), ((2, 5, 3), (2, 5)), ((5, 3), (5,))]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("driver", DRIVERS)
def test_least_squares(driver: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    def program(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.linalg.lstsq(a, b, driver=driver))

    same_as_eager(
        lambda: Scene(program, tuple(torch.randn(shape, requires_grad=True) for shape in shapes)), calls=2
    )


def test_least_squares_without_full_rank() -> None:
    def residual(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lstsq(a, b, driver="gelsd").residuals

    a, b = torch.ones(5, 3), torch.randn(5, 2)
    compiled = aotdist.compile(residual, backend="fx")
    assert torch.equal(compiled(a, b), residual(a, b)) and not residual(a, b).numel()
    full = torch.randn(5, 3)
    assert torch.equal(compiled(full, b), residual(full, b)) and residual(full, b).numel() == 2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_it_is_eagers(reduction: str, targets: str, dynamic: bool) -> None:
    def program(x: torch.Tensor, target: torch.Tensor, *lengths: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(x.log_softmax(-1), target, *lengths, reduction=reduction, zero_infinity=True)

    same_as_eager(
        lambda: Scene(program, (torch.randn(12, 2, 6, requires_grad=True), TARGETS[targets](), *LENGTHS)),
        calls=2,
        dynamic=dynamic,
    )


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(4, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, target: torch.Tensor, *lengths: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(x).tanh()
        return F.ctc_loss(self.head(hidden).log_softmax(-1), target, *lengths, zero_infinity=True)


def test_inductor() -> None:
    eager = Recogniser()
    compiled = aotdist.compile(copy.deepcopy(eager), backend="inductor")
    for length, lengths in ((5, LENGTHS), (7, LENGTHS), (7, NUMBERS)):
        # The longest target is shorter.
        arguments = torch.randn(12, 2, 4), torch.randint(1, 6, (2, length)), *lengths
        losses: list[Any] = [model(*arguments) for model in (eager, compiled)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0])
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
