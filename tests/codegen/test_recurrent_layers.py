"""Recurrent layers train by Inductor, once and twice differentiated, and predict; by other compilers, too."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import aotdist
import aotdist.functorch as drop_in

pytestmark = pytest.mark.usefixtures("inductor_cache")


class Last(nn.Module):
    """A recurrent layer's last output, through a linear one."""

    def __init__(self, layer: type[nn.RNNBase], num_layers: int = 2) -> None:
        super().__init__()
        self.layer = layer(4, 8, num_layers=num_layers, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x)[0][:, -1])


@pytest.mark.slow
@pytest.mark.parametrize("layer", [nn.LSTM, pytest.param(nn.GRU, marks=pytest.mark.sweep)])
def test_predicts_and_trains_as_in_eager(layer):
    torch.manual_seed(0)
    model = Last(layer)
    compiled = aotdist.compile(copy.deepcopy(model), backend="inductor")
    x = torch.randn(4, 2, 4)
    with torch.no_grad():
        assert_close(compiled(x), model(x))
    for one in (model, compiled):
        one(x).square().sum().backward()
    assert_close([p.grad for p in compiled.parameters()], [p.grad for p in model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer", [nn.RNN, *(pytest.param(kind, marks=pytest.mark.sweep) for kind in (nn.GRU, nn.LSTM))]
)
def test_gradients_of_gradients_are_as_in_eager(layer):
    torch.manual_seed(0)
    model = Last(layer, num_layers=1)
    compiled = aotdist.compile(copy.deepcopy(model), backend="inductor")
    x = torch.randn(4, 2, 4)
    found = []
    for one in (model, compiled):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(one(leaf).sum(), leaf, create_graph=True)
        (grad.square().sum() + one(leaf).square().sum()).backward()
        found.append([grad.detach(), leaf.grad, *(param.grad for param in one.parameters())])
    assert_close(*found)


@pytest.mark.parametrize(
    "compiled",
    [
        lambda model: aotdist.compile(model, backend=lambda gm, _: gm),
        lambda model: drop_in.aot_module(model, drop_in.nop),
    ],
    ids=["compile", "aot_module"],
)
@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_compiler_of_the_users_may_run_the_graphs_as_they_are(layer, compiled):
    torch.manual_seed(0)
    model = Last(layer)
    x, seen = torch.randn(4, 5, 4), []
    for one in (model, compiled(copy.deepcopy(model))):
        out = one(x)
        out.sum().backward()
        seen.append([out, *(param.grad for param in one.parameters())])
    assert all(map(torch.equal, *seen))
