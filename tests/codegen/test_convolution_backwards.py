"""Convolutions with symbolic sizes under Inductor are one program for all sizes, backwards too."""

import copy

import pytest
import torch
from torch import nn

import aotdist
from aotdist.api import compiled_call

pytestmark = pytest.mark.usefixtures("inductor_cache")


def test_images_of_several_sizes() -> None:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=2)
    eager = nn.Sequential(*layers)
    ours = copy.deepcopy(eager)
    aotdist.compile(ours, backend="inductor", settings={"dynamic": True})
    for size in (8, 11, 14):
        x = torch.randn(2, 3, size, size + 1)
        found = []
        for model in (eager, ours):
            leaf = x.clone().requires_grad_()
            out = model(leaf)
            grads = torch.autograd.grad(out.square().sum(), [leaf, *model.parameters()])
            found.append([out.detach(), *grads])
        torch.testing.assert_close(*found)
    assert len(compiled_call(ours).artifacts) == 1
