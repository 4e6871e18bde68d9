"""What an optimizer holds, looked at again: the same objects and other numbers, or everything anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from aotdist.step.held import HeldState, held_by

VARYING = frozenset({"lr"})


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    params = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    optimizer = torch.optim.AdamW(params, lr=0.5)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def held(optimizer: torch.optim.Optimizer) -> HeldState:
    return held_by([optimizer], {}, VARYING)


def test_the_same_if_nothing_was_assigned(optimizer: torch.optim.Optimizer) -> None:
    before = held(optimizer)
    optimizer.step()
    assert before.now([optimizer]) is before


def test_other_numbers(optimizer: torch.optim.Optimizer) -> None:
    before = held(optimizer)
    optimizer.param_groups[0]["lr"] = 0.25
    after = before.now([optimizer])
    assert after is not None
    assert [place.value for place in after.numbers] == [0.25]
    assert (after.numbers, after.layout) == (held(optimizer).numbers, before.layout)
    optimizer.param_groups[0]["lr"] = 0.125
    with after.put_back():
        optimizer.param_groups[0]["lr"] = 1.0
    assert optimizer.param_groups[0]["lr"] == 0.25


def _replace_state(optimizer: torch.optim.Optimizer) -> None:
    entry = next(iter(optimizer.state.values()))
    entry["exp_avg"] = entry["exp_avg"].clone()


def _add_a_group(optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [torch.ones(1, requires_grad=True)]})


@pytest.mark.parametrize(
    "change",
    [
        _replace_state,
        _add_a_group,
        lambda o: o.load_state_dict(o.state_dict()),
        lambda o: o.param_groups[0].update(lr=torch.tensor(0.5)),
        lambda o: o.param_groups[0].update(weight_decay=0.5),
        lambda o: o.param_groups[0].update(another=1),
        lambda o: o.param_groups[0]["params"].reverse(),
        lambda o: o.state.popitem(),
        lambda o: next(iter(o.state.values())).pop("step"),
    ],
    ids=["tensor", "group", "state_dict", "type", "constant", "key", "params", "entry", "key of an entry"],
)
def test_anything_else_is_looked_at_anew(
    optimizer: torch.optim.Optimizer, change: Callable[[torch.optim.Optimizer], object]
) -> None:
    before = held(optimizer)
    change(optimizer)
    assert before.now([optimizer]) is None
