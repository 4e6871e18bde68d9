"""Batch norms become parts of the weights before them, where that is what the program computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aotdist
from tests.freezing.models import resnet, targets, trained

NORM = "aten._native_batch_norm_legit_no_training.default"


def folded(module: nn.Module, **options):
    return aotdist.freeze(module, backend="fx", fold_batch_norms=True, **options)


class Several(nn.Module):
    """The convolution has a reader beside the norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) + y


class Functional(nn.Module):
    """The norm's weights are computed from the input."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("var", torch.rand(4) + 1)

    def forward(self, x):
        weight = x.mean() * torch.ones(4)
        return nn.functional.batch_norm(self.conv(x), self.mean, self.var, weight)


def _image():
    return torch.randn(2, 3, 8, 8)


FOLDED = {
    "a convolution": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), _image),
    "without bias": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)), _image),
    "groups": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6)), _image),
    "no weights": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)), _image),
    "one dimension": (
        lambda: nn.Sequential(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)),
        lambda: torch.randn(2, 3, 9),
    ),
    "three": (
        lambda: nn.Sequential(nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4)),
        lambda: torch.randn(2, 3, 5, 5, 5),
    ),
    "a linear layer": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), lambda: torch.randn(5, 3)),
    "without a bias": (
        lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4)),
        lambda: torch.randn(5, 3),
    ),
}
LEFT = {
    "a second reader": (Several, _image),
    "before the convolution": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), _image),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4)), _image),
    "weights that are no constants": (Functional, _image),
    "something between": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4)), _image),
}


@pytest.mark.parametrize(("make", "example"), FOLDED.values(), ids=list(FOLDED))
def test_it_is_folded(make, example):
    x = example()
    module = trained(make(), *x.shape)
    frozen = folded(module, args=(x,))
    torch.testing.assert_close(frozen(x), module(x).detach(), rtol=1e-5, atol=1e-5)
    assert NORM not in targets(frozen) and len(targets(frozen)) == 1


@pytest.mark.parametrize(("make", "example"), LEFT.values(), ids=list(LEFT))
def test_it_is_left(make, example):
    x = example()
    module = trained(make(), *x.shape)
    frozen = folded(module, args=(x,))
    assert torch.equal(frozen(x), module(x).detach())
    assert targets(frozen)[NORM] == 1


def test_a_resnet_has_none_left():
    module, x = resnet()
    frozen = folded(module, args=(x,))
    found, wanted = frozen(x), module(x)
    assert NORM not in targets(frozen)
    for name in ("logits", "features"):
        torch.testing.assert_close(found[name], wanted[name].detach(), rtol=1e-5, atol=1e-5)
    weights = sum(m.weight.nbytes for m in module.modules() if isinstance(m, (nn.Conv2d, nn.Linear)))
    biases = 4 * (8 + 8 + 8 + 16 + 16 + 16 + 10)
    assert frozen.constant_bytes == weights + biases


def test_weights_are_rounded_once():
    """In float32 the folded weights are within half a unit in the last place of the exact ones."""
    module = trained(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), 5, 3)
    linear, norm = module
    scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
    exact = linear.weight.double() * scale[:, None]
    frozen = folded(module)
    found = frozen(torch.eye(3)) - frozen(torch.zeros(1, 3))
    torch.testing.assert_close(found.t().double(), exact.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_stay(dtype: torch.dtype):
    module = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), 2, 3, 8, 8).to(dtype)
    x = _image().to(dtype)
    frozen = folded(module, args=(x,))
    found, wanted = frozen(x), module(x).detach()
    assert found.dtype is dtype
    torch.testing.assert_close(
        found,
        wanted,
        rtol=3e-2 if dtype is torch.bfloat16 else 1e-12,
        atol=1e-1 if dtype is torch.bfloat16 else 1e-12,
    )


def test_by_default_it_is_for_backends_that_round_otherwise():
    module, x = resnet()

    def compiler(gm, _):
        return gm.forward

    assert NORM in targets(aotdist.freeze(module, (x,), backend="fx"))
    assert NORM not in targets(aotdist.freeze(module, (x,), backend=compiler))
    assert NORM in targets(aotdist.freeze(module, (x,), backend=compiler, fold_batch_norms=False))
