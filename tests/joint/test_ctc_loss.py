"""CTC losses, whose lengths are tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aotdist
from tests.semantics.observation import Scene, same_as_eager

LENGTHS = torch.tensor([12, 3]), torch.tensor([4, 2])
TARGETS = {
    "in rows": lambda: torch.randint(1, 6, (2, 5)),
    "one after another": lambda: torch.randint(1, 6, (6,)),
}


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
        self.encoder, self.head = nn.GRU(4, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor, target: torch.Tensor, *lengths: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.encoder(x)
        return F.ctc_loss(self.head(hidden).log_softmax(-1), target, *lengths, zero_infinity=True)


def test_inductor() -> None:
    eager = Recogniser()
    compiled = aotdist.compile(copy.deepcopy(eager), backend="inductor")
    for length in (5, 7):  # the longest target is shorter
        arguments = torch.randn(12, 2, 4), torch.randint(1, 6, (2, length)), *LENGTHS
        losses: list[Any] = [model(*arguments) for model in (eager, compiled)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0])
    for ours, theirs in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
