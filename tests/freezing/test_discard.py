"""Parameters that were discarded give back their memory, and whoever asks for them is told."""

from __future__ import annotations

import functools
import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.freezing.models import resnet

fx = functools.partial(aotdist.freeze, backend="fx")


def memory_of(module: nn.Module) -> dict[str, StorageWeakRef]:
    return {name: StorageWeakRef(p.untyped_storage()) for name, p in module.named_parameters()}


def freed(memory: dict[str, StorageWeakRef]) -> set[str]:
    return {name for name, storage in memory.items() if storage.expired()}


class Cast(nn.Module):
    """One parameter is cast, one is read as it is, one is not read."""

    def __init__(self):
        super().__init__()
        self.cast = nn.Parameter(torch.randn(8, 8))
        self.plain = nn.Parameter(torch.randn(8))
        self.unused = nn.Parameter(torch.randn(8))
        self.register_buffer("table", torch.randn(16, 8))

    def forward(self, x):
        rows = self.table[: len(x)] * 2
        return (x @ self.cast.to(torch.bfloat16).to(x.dtype)) * self.plain + rows


def test_memory_is_given_back():
    module, x = Cast().eval(), torch.randn(3, 8)
    wanted, memory = module(x).detach(), memory_of(module)
    frozen = fx(module, (x,), discard_parameters=True)
    assert freed(memory) == {"cast", "unused"}  # `plain` is a constant itself
    assert torch.equal(frozen(x), wanted)
    del frozen
    gc.collect()  # graphs are all cycles
    assert freed(memory) == {"cast", "plain", "unused"}


def test_nothing_is_given_back_unasked():
    module, x = Cast().eval(), torch.randn(3, 8)
    memory = memory_of(module)
    frozen = fx(module, (x,))
    assert not freed(memory)
    frozen.discard_parameters()
    assert freed(memory) == {"cast", "unused"}


def test_weights_of_folded_norms_are_given_back():
    module, x = resnet()
    wanted, memory = module(x)["logits"].detach(), memory_of(module)
    frozen = fx(module, fold_batch_norms=True, discard_parameters=True)
    torch.testing.assert_close(frozen(x)["logits"], wanted, rtol=1e-5, atol=1e-5)
    assert freed(memory) == memory.keys() - {"head.weight", "head.bias"}


def test_without_arguments_the_first_call_discards():
    module, x = Cast().eval(), torch.randn(3, 8)
    frozen = fx(module, discard_parameters=True)
    assert module.cast.numel() == 64
    frozen(x)
    assert module.cast.numel() == 0


def test_the_parameters_stay_the_same_objects():
    """An optimizer, or another name, that holds one holds no memory either."""
    module, x = Cast().eval(), torch.randn(3, 8)
    held = list(module.parameters())
    held[0].grad = torch.ones(8, 8)
    fx(module, (x,), discard_parameters=True)
    assert all(a is b for a, b in zip(held, module.parameters(), strict=True))
    assert [p.numel() for p in held] == [0, 0, 0] and held[0].grad is None


def test_other_kinds_of_calls_find_their_constants():
    """They need buffers, which are kept, and constants that are there."""
    module = Cast().eval()
    xs = [torch.randn(rows, 8) for rows in (3, 7, 16)]
    wanted = [module(x).detach() for x in xs]
    frozen = fx(module, (xs[0],), discard_parameters=True)
    for x, each in zip(xs, wanted, strict=True):
        assert torch.equal(frozen(x), each)
    assert len(frozen.artifacts) == 3


def test_symbolic_sizes_need_no_more_constants():
    module, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).eval(), torch.randn(5, 3)
    wanted = [module(x[:rows]).detach() for rows in (5, 3)]
    frozen = fx(module, (x,), discard_parameters=True, settings={"dynamic": True})
    assert torch.equal(frozen(x), wanted[0]) and torch.equal(frozen(x[:3]), wanted[1])
    assert len(frozen.artifacts) == 1


def test_a_call_that_needs_what_is_gone_is_refused_by_name():
    module, x = Cast().eval(), torch.randn(3, 8)
    frozen = fx(module, (x,), discard_parameters=True)
    with pytest.raises(UnsupportedProgram, match="this call needs `cast`, which was discarded"):
        frozen(x.double())
    assert frozen(x).shape == (3, 8)


def test_inference_mode_needs_no_more_constants():
    module, x = resnet()
    wanted = module(x)["logits"].detach()
    frozen = fx(module, (x,), discard_parameters=True)
    with torch.inference_mode():
        for y in (x, x.clone()):
            assert torch.equal(frozen(y)["logits"], wanted)


def test_the_module_says_that_it_is_gone():
    module, x = resnet()
    fx(module, (x,), discard_parameters=True)
    with pytest.raises(UnsupportedProgram, match="the parameters of this ResNet are gone.*\n.*\n.*freeze"):
        module(x)
    with pytest.raises(UnsupportedProgram, match=r"the parameters of `head` \(Linear\) are gone"):
        module.head(torch.ones(1, 16))
    with pytest.raises(UnsupportedProgram, match="this ResNet are gone"):
        module.state_dict()
    with pytest.raises(UnsupportedProgram, match="this ResNet are gone"):
        fx(module)(x)
    with pytest.raises(UnsupportedProgram, match="this ResNet are gone"):
        nn.Sequential(module).state_dict()


def test_twice_is_once():
    module, x = Cast().eval(), torch.randn(3, 8)
    frozen = fx(module, (x,), discard_parameters=True)
    frozen.discard_parameters()
    assert frozen(x).shape == (3, 8)


def test_a_call_that_fails_discards_nothing():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps.add_(1)
            return x * self.weight

    module = Writes().eval()
    frozen = fx(module, discard_parameters=True)
    with pytest.raises(UnsupportedProgram, match="`steps` is written"):
        frozen(torch.ones(3))
    assert torch.equal(module(torch.ones(3)), torch.ones(3))
