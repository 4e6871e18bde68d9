"""What a whole step has alive at once: no more than eager, and gradients go as they come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.report.profile import most_allocated_by


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, checkpointed: bool, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def make(checkpointed: bool = False, depth: int = 8, **options: bool) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    model = Model(checkpointed, depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


@pytest.mark.parametrize("options, most", [({}, 0.6), ({"foreach": True}, 1.0), ({"fused": True}, 1.05)])
def test_gradients_go_as_they_come(options: dict[str, bool], most: float) -> None:
    """One graph beside eager, of few rows: foreach and fused steps need all gradients at once."""
    eager, step, x = make(**options), aotdist.compile(make(**options), backend="fx"), torch.randn(8, 64)
    for _ in range(3):
        assert torch.equal(step(x), eager(x))
    ours, theirs = most_allocated_by(lambda: step(x)), most_allocated_by(lambda: eager(x))
    assert 0 < ours <= most * theirs


def test_compilers_break_fused_steps_up() -> None:
    """What a fused step writes would all be alive at once; each parameter's update is a kernel of its own."""
    eager, x = make(depth=3, fused=True), torch.randn(8, 64)
    step = aotdist.compile(make(depth=3, fused=True), backend="inductor")
    for _ in range(3):
        torch.testing.assert_close(step(x), eager(x))
    assert 0 < most_allocated_by(lambda: step(x)) <= 0.6 * most_allocated_by(lambda: eager(x))


def test_checkpoints_are_computed_again() -> None:
    """What a checkpoint computes again is not taken from the forward: that would keep it alive."""
    step, x = aotdist.compile(make(checkpointed=True), backend="fx"), torch.randn(512, 64)
    eager = make(checkpointed=True)
    for _ in range(3):
        assert torch.equal(step(x), eager(x))
    assert 0 < most_allocated_by(lambda: step(x)) <= most_allocated_by(lambda: eager(x))


def test_cheap_operations_are_made_again() -> None:
    """By the policy of compilers that fuse: the backward does not read the forward's GELU."""
    step = aotdist.compile(make(), backend="fx", settings={"partition": "min_cut"})
    eager, x = make(), torch.randn(8, 64)
    for _ in range(3):
        assert torch.equal(step(x), eager(x))
    graph = step.graphs[0]["inference"].graph
    assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)) == 16
