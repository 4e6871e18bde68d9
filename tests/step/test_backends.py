"""Compilers of tensors get steps that compute numbers in Python: what they make of them is close to `fx`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aotdist
from tests.step import optimizers
from tests.step.comparison import Pair, Plain, batch, loss_of

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "Adafactor with a tensor": lambda params: torch.optim.Adafactor(params, lr=torch.tensor(0.05)),
    "Counting": optimizers.Counting,
}


def close(pair: Pair, backend: Any) -> aotdist.TrainStep:
    steps = [
        aotdist.train_step(model, loss_of, optimizer, clip=1.0, backend=kind)
        for model, optimizer, kind in zip(pair.models, pair.optimizers, ("fx", backend), strict=True)
    ]
    for at in range(5):
        for optimizer in pair.optimizers:
            optimizer.param_groups[0]["lr"] *= 0.75
        losses: list[torch.Tensor] = []
        for step in steps:
            torch.manual_seed(at)
            losses.append(step(batch(at)))
        torch.testing.assert_close(*losses)
    states = [
        [model.state_dict(), optimizer.state_dict()["state"]]
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True)
    ]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-5)
    assert len(steps[1].graphs) == 1
    return steps[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_inductor(name: str) -> None:
    close(Pair.of(OPTIMIZERS[name], Plain), "inductor")


def test_function_gets_tensors_alone() -> None:
    taken: list[torch.fx.GraphModule] = []

    def compiler(gm: torch.fx.GraphModule, fakes: Any) -> Any:
        taken.append(gm)
        return gm.forward

    close(Pair.of(OPTIMIZERS["AdamW"], Plain), compiler)
    (gm,) = taken
    assert all(isinstance(node.meta["val"], torch.Tensor) for node in gm.graph.find_nodes(op="placeholder"))
    assert "_local_scalar_dense" not in str(gm.code)
