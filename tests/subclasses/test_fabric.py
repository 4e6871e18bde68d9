"""A model that Fabric has wrapped is compiled as one that was compiled before: the wrapper runs around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import nn

import aotdist
from tests.ranks.harness import World


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.25), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.body(x), "x": x}

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)["y"].float().square().mean()


def trained(fabric: Fabric, *, compiled: bool, marked: bool = False) -> tuple[Any, list[torch.Tensor]]:
    """What Fabric made of the model, and losses, an evaluation and weights."""
    torch.manual_seed(0)
    net = Net()
    model: Any
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.1))
    if compiled:
        assert aotdist.compile(model, backend="fx") is model
    if marked:
        model.mark_forward_method("training_step")
    losses = []
    for step in range(3):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + fabric.global_rank))
        loss = model.training_step(batch) if marked else model(batch)["y"].float().square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    model.eval()
    return model, [*losses, model(torch.ones(2, 4))["y"].detach(), *(p.detach() for p in net.parameters())]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_every_precision_is_eager_bit_for_bit(precision: Any) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    _, expected = trained(fabric, compiled=False)
    model, found = trained(fabric, compiled=True)
    assert all(map(torch.equal, found, expected))
    assert [found[0].dtype, found[3].dtype] == [expected[0].dtype, expected[3].dtype]
    assert len(model.graphs) == 2  # for training and for evaluation
    assert "fx" in str(model.explain()) and model.module.source == model.source


def test_a_backward_that_fabric_does_not_see_is_still_told_off() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = aotdist.compile(fabric.setup_module(nn.Linear(2, 2)), backend="fx")
    fabric.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(RuntimeError, match=r"requires you to call `fabric.backward\(loss\)`"):
        model(torch.ones(1, 2)).sum().backward()


def in_ddp(marked: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
        where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "GROUP_RANK": "0"}
        for name, value in {**where, "TORCHELASTIC_RUN_ID": "there"}.items():
            patch.setenv(name, value)
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed")
        fabric.launch()
        _, expected = trained(fabric, compiled=False, marked=marked)
        model, found = trained(fabric, compiled=True, marked=marked)
    assert all(map(torch.equal, found, expected))
    assert any("all_reduce" in graph.code for graph in model.graphs[-1].values())


@pytest.mark.ranks
@pytest.mark.parametrize("marked", [False, True], ids=["forward", "marked method"])
def test_ddp_inside_of_it_reduces_in_the_graph(world2: World, marked: bool) -> None:
    world2.run(in_ddp, marked)


def test_a_step_may_hold_it() -> None:
    """Its forward communicates nothing by itself."""
    fabric = Fabric(accelerator="cpu", devices=1)
    net = nn.Linear(4, 4)
    model = fabric.setup_module(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step = aotdist.train_step(model, lambda model, x: model(x).square().mean(), optimizer, backend="fx")
    for _ in range(3):
        step(torch.ones(2, 4))
    assert len(step.graphs) == 1


def test_a_whole_step_of_its_parts() -> None:
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        fabric = Fabric(accelerator="cpu", devices=1)
        net = nn.Linear(4, 4)
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))

        def step(x: torch.Tensor, fabric=fabric, model=model, optimizer=optimizer) -> torch.Tensor:
            loss = model(x).square().mean()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.1, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = aotdist.compile(step, backend="fx") if compiles else step
        found.append([run(torch.full((2, 4), float(at))) for at in range(4)] + list(net.parameters()))
        assert not compiles or len(run.graphs) == 1
    assert all(map(torch.equal, *found))
