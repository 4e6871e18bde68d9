"""SpecAugment: masks of transformers that NumPy draws are drawn anew at each call, as eager draws them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.hubert.modeling_hubert import (
    _compute_mask_indices,  # pyright: ignore[reportPrivateUsage]
)

import aotdist


class Masked(nn.Module):
    """Hides spans of time behind a learned vector, as the speech models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.rand(8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, attention_mask: Any) -> torch.Tensor:
        x = self.layer(x)
        mask = _compute_mask_indices(
            (x.shape[0], x.shape[1]), 0.5, mask_length=2, attention_mask=attention_mask, min_masks=1
        )
        mask = torch.tensor(mask, device=x.device, dtype=torch.bool)
        x[mask] = self.embedding
        return x * x


@pytest.mark.parametrize("padded", [False, True])
def test_masks_are_those_of_eager_at_each_call(padded: bool) -> None:
    eager = Masked()
    compiled = copy.deepcopy(eager)
    aotdist.compile(compiled, backend="fx")
    kept = torch.ones(2, 12, dtype=torch.long)
    kept[0, 7:] = 0
    outs, states = [], []
    for model in (eager, compiled):
        np.random.seed(0)
        for time in (12, 12, 10, 11):
            x = torch.arange(2.0 * time * 8).view(2, time, 8).cos()
            out = model(x, kept[:, :time] if padded else None)
            out.sum().backward()
            outs.append(out.detach())
        states.append(np.random.get_state(legacy=False)["state"])
    assert all(map(torch.equal, outs[:4], outs[4:]))
    assert not torch.equal(outs[0], outs[1])
    for mine, other in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)  # pyright: ignore[reportArgumentType]
    assert str(states[0]) == str(states[1])
