"""Convolutions run with channels last, nothing is converted between two, and results have eager's strides."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aotdist
from tests.freezing.models import graph_of, resnet, targets, trained

CLONE = "aten.clone.default"


def laid_out(module: nn.Module, x: torch.Tensor, **options):
    return aotdist.freeze(module, (x,), backend="fx", channels_last=True, **options)


def assert_close_and_laid_out_alike(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert found.stride() == wanted.stride()


class Chain(nn.Module):
    """Convolutions with what keeps layouts between them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Conv2d(16, 4, 1),
        )
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        y = self.norm(self.a(x)).relu()
        z = nn.functional.gelu(self.b(y)) * 2 + y
        z = nn.functional.max_pool2d(torch.cat([y, z], 1), 2)
        return self.c(nn.functional.interpolate(z, scale_factor=2.0))


def test_one_conversion_at_each_end():
    module, x = trained(Chain(), 2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    frozen = laid_out(module, x)
    assert_close_and_laid_out_alike(frozen(x), module(x).detach())
    assert targets(frozen)[CLONE] == 2


def test_values_between_have_channels_last():
    module, x = trained(Chain(), 2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    frozen = laid_out(module, x)
    convolutions = graph_of(frozen).graph.find_nodes(
        op="call_function", target=torch.ops.aten.convolution.default
    )
    assert len(convolutions) == 3
    for node in convolutions:
        for value in (node, node.args[0], node.args[1]):
            assert value.meta["val"].is_contiguous(memory_format=torch.channels_last), value


class Zoo(nn.Module):
    """What models do with pixels: gates, norms, pools, splits, softmax, upsampling."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.narrow, self.wide = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.act, self.groups, self.up = nn.PReLU(8), nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 8, 2, 2)

    def forward(self, x):
        features = self.norm(self.a(x))
        y = nn.functional.hardswish(self.depthwise(features))
        pooled = nn.functional.adaptive_avg_pool2d(y, 1)
        y = y * self.wide(self.narrow(pooled).relu()).sigmoid()
        y = nn.functional.avg_pool2d(nn.functional.pad(y, (1, 1, 1, 1)), 2)
        return (
            nn.functional.interpolate(y, size=(7, 7), mode="bilinear").softmax(1),
            y.mean((2, 3)),
            y.mean(1),
            y.max(1).values,
            nn.functional.adaptive_avg_pool2d(y, 2),
            features.split(4, 1)[0] + 1,
            self.narrow(torch.cat([y, self.act(y)], 1)[:, :8].clamp(-1, 1)),
            self.groups(features),
            self.up(features),
            torch.where(y > 0, y, -y).half(),
            features.cumsum(1),
            nn.functional.pixel_shuffle(self.depthwise(features), 2),
        )


def test_every_result_of_a_zoo_is_laid_out_as_eagers():
    module, x = trained(Zoo(), 2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    found, wanted = laid_out(module, x)(x), module(x)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-2 if a.dtype is torch.half else 1e-4, atol=1e-4)
        assert a.stride() == b.stride()


@pytest.mark.parametrize("make", [Chain, Zoo], ids=["chain", "zoo"])
def test_what_runs_is_laid_out_as_the_graph_says(make):
    """Fake values and real ones agree, so nothing downstream is compiled for other strides."""
    module, x = trained(make(), 2, 3, 8, 8), torch.randn(2, 3, 8, 8)
    seen = []

    def compiler(gm, _):
        class Checks(torch.fx.Interpreter):
            def run_node(self, n):
                value = super().run_node(n)
                if isinstance(value, torch.Tensor):
                    assert value.stride() == n.meta["val"].stride(), n
                    seen.append(n)
                return value

        return lambda *args: Checks(gm).run(*args)

    frozen = aotdist.freeze(module, (x,), backend=compiler, fold_batch_norms=False)
    frozen(x)
    assert len(seen) > 10


def test_a_resnet():
    module, x = resnet()
    frozen = laid_out(module, x, fold_batch_norms=True)
    found, wanted = frozen(x), module(x)
    for name in ("logits", "features"):
        assert_close_and_laid_out_alike(found[name], wanted[name].detach())
    assert targets(frozen)[CLONE] == 2


def test_symbolic_sizes():
    module, _ = resnet()
    frozen = aotdist.freeze(
        module, backend="fx", fold_batch_norms=True, channels_last=True, settings={"dynamic": True}
    )
    for size in ((2, 3, 32, 32), (3, 3, 48, 40)):
        x = torch.randn(size)
        found, wanted = frozen(x), module(x)
        for name in ("logits", "features"):
            assert_close_and_laid_out_alike(found[name], wanted[name].detach())
    assert len(frozen.artifacts) == 1


class Views(nn.Module):
    """What reads memory in order, and results that share it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = self.a(x)
        rows = y.view(2, -1)
        z = self.b(y)
        return y, y.transpose(1, 2), rows.sum(1), z.flatten(2), z.permute(0, 2, 3, 1)


def test_views_and_results_that_share_memory():
    module, x = Views().eval(), torch.randn(2, 3, 8, 8)
    found, wanted = laid_out(module, x)(x), module(x)
    for a, b in zip(found, wanted, strict=True):
        assert_close_and_laid_out_alike(a, b.detach())
    assert found[1].data_ptr() == found[0].data_ptr() and found[3].data_ptr() == found[4].data_ptr()


def test_an_input_that_has_channels_last_is_not_converted():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    x = torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    frozen = laid_out(module, x)
    assert_close_and_laid_out_alike(frozen(x), module(x).detach())
    assert CLONE not in targets(frozen)


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: nn.Conv3d(3, 4, 3), (2, 3, 6, 6, 6)),
        (lambda: nn.Conv2d(4, 4, 3, groups=4), (2, 4, 8, 8)),
        (lambda: nn.Conv2d(3, 4, 1), (2, 3, 8, 8)),
        (lambda: nn.Conv2d(1, 1, 3), (2, 1, 8, 8)),
        (lambda: nn.ConvTranspose2d(3, 4, 3), (2, 3, 8, 8)),
        (lambda: nn.Conv2d(3, 4, 8), (2, 3, 8, 8)),
        (lambda: nn.Conv1d(3, 4, 3), (2, 3, 9)),
    ],
    ids=[
        "three dimensions",
        "groups",
        "of one pixel",
        "one channel",
        "transposed",
        "to one pixel",
        "one dimension",
    ],
)
def test_kinds_of_convolutions(make, size):
    module, x = nn.Sequential(make(), nn.ReLU()).eval(), torch.randn(size)
    assert_close_and_laid_out_alike(laid_out(module, x)(x), module(x).detach())


def test_weights_are_laid_out_once():
    module, x = nn.Conv2d(3, 4, 3).eval(), torch.randn(2, 3, 8, 8)
    frozen = laid_out(module, x)
    assert targets(frozen) == {CLONE: 2, "aten.convolution.default": 1}
    assert module.weight.is_contiguous()
    assert frozen.constant_bytes == module.weight.nbytes + module.bias.nbytes


def test_a_weight_that_is_no_constant_is_left():
    class Dynamic(nn.Module):
        def forward(self, x, weight):
            return nn.functional.conv2d(x, weight)

    x, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    frozen = aotdist.freeze(Dynamic().eval(), (x, weight), backend="fx", channels_last=True)
    assert torch.equal(frozen(x, weight), nn.functional.conv2d(x, weight))
    assert CLONE not in targets(frozen)
