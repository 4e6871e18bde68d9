"""The optimizer's groups, the schedule, the clipping."""

import pytest
import torch
from torch import nn

from aotdist.launch.config import ModelOptions, OptimOptions
from aotdist.launch.model import build_decoder
from aotdist.launch.optim import build_optimizer, clip_gradients, learning_rate, set_learning_rate

OPTIONS = OptimOptions(steps=100, warmup_steps=10, lr=1.0, min_lr_ratio=0.1)


def test_the_rate_rises_to_its_peak_and_falls_to_its_floor():
    rates = [learning_rate(step, OPTIONS) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(rates) == rates[9] == 1.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[54] == pytest.approx(0.55)  # half-way down after half of the cosine


def test_without_warm_up_the_first_step_is_already_on_the_cosine():
    options = OptimOptions(steps=10, warmup_steps=0, lr=1.0)
    assert 0.9 < learning_rate(1, options) < 1.0


def test_a_warm_up_longer_than_the_run_is_just_cut():
    assert learning_rate(5, OptimOptions(steps=5, warmup_steps=10, lr=1.0)) == 0.5


def test_only_matrices_decay():
    model = build_decoder(ModelOptions(dim=16, num_layers=1), seq_len=4, seed=0)
    matrices, vectors = build_optimizer(model, OptimOptions(weight_decay=0.1)).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {parameter.dim() for parameter in matrices["params"]} == {2}
    assert len(vectors["params"]) == 3  # two norms in the block, one at the end
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(model.parameters()))


def test_the_rate_reaches_every_group():
    model = build_decoder(ModelOptions(dim=16, num_layers=1), seq_len=4, seed=0)
    optimizer = build_optimizer(model, OPTIONS)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.parametrize(("clip_norm", "left"), [(1.0, 1.0), (100.0, 5.0), (0.0, 5.0)])
def test_clipping_returns_the_norm_before_it(clip_norm, left):
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert clip_gradients(model, clip_norm).item() == 5.0
    assert model.weight.grad.norm().item() == pytest.approx(left, rel=1e-5)
