"""Recurrent layers train by Inductor, once and twice differentiated, and predict."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import aotdist

pytestmark = pytest.mark.usefixtures("inductor_cache")


class Last(nn.Module):
    """A recurrent layer's last output, through a linear one."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = layer(8, 16, num_layers=2, batch_first=True)
        self.out = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x)[0][:, -1])


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_as_in_eager(layer):
    torch.manual_seed(0)
    model = Last(layer)
    compiled = aotdist.compile(copy.deepcopy(model), backend="inductor")
    x = torch.randn(4, 5, 8)
    with torch.no_grad():
        assert_close(compiled(x), model(x))
    found = []
    for one in (model, compiled):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(one(leaf).sum(), leaf, create_graph=True)
        (grad.square().sum() + one(leaf).square().sum()).backward()
        found.append([grad.detach(), leaf.grad, *(param.grad for param in one.parameters())])
    assert_close(*found)
