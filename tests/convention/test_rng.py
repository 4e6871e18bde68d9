"""Philox against published numbers, and random operators as functions of a seed and an offset."""

import pytest
import torch

from aotdist.convention.rng import PHILOX, RULES, Stream, functional_draw, philox_4x32
from aotdist.errors import UnsupportedProgram
from aotdist.torch_seam.operators import OpOverload
from aotdist.torch_seam.trees import pytree

FULL = 0xFFFFFFFF

# From the known-answer tests of Random123: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_published_words(counter, key, words):
    found = philox_4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(map(int, found)) == words


def stream(seed: int = 7, offset: int = 0) -> Stream:
    return Stream(lambda: (torch.tensor(seed), torch.tensor(offset)))


def test_an_offset_counts_blocks_of_four_words():
    first = stream().words(20)
    assert torch.equal(first[8:], stream(offset=2).words(12))
    drawing = stream()
    assert torch.equal(torch.cat([drawing.words(3), drawing.words(5)]), torch.cat([first[:3], first[4:9]]))
    assert drawing.blocks == 3


def test_a_seed_of_64_bits():
    assert not torch.equal(stream(1).words(4), stream(1 + (1 << 32)).words(4))
    assert PHILOX(torch.tensor(-1), torch.tensor(0), 0, 5).tolist()[:1] != stream(0).words(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_and_normal(dtype):
    count = 40_000
    uniform = stream().uniform((count,), dtype).double()
    assert 0 <= uniform.min() and uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 0.01 and abs(uniform.var() * 12 - 1) < 0.02
    normal = stream().normal((count,), dtype).double()
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02 and normal.isfinite().all()


def x(*size: int) -> torch.Tensor:
    return torch.zeros(size or (200, 200))


half = torch.full((200, 200), 0.5)
ATEN = torch.ops.aten
EXPECTATIONS: dict[OpOverload, tuple[tuple, float]] = {
    ATEN.rand.default: (([200, 200],), 0.5),
    ATEN.rand_like.default: ((x(),), 0.5),
    ATEN.uniform.default: ((x(), -1.0, 5.0), 2.0),
    ATEN.randn.default: (([200, 200],), 0.0),
    ATEN.randn_like.default: ((x(),), 0.0),
    ATEN.normal_functional.default: ((x(), 3.0, 2.0), 3.0),
    ATEN.normal.Tensor_float: ((half, 2.0), 0.5),
    ATEN.normal.float_Tensor: ((1.0, half), 1.0),
    ATEN.normal.Tensor_Tensor: ((half, half), 0.5),
    ATEN.normal.float_float: ((1.0, 0.5, [200, 200]), 1.0),
    ATEN.bernoulli.default: ((half * 0.5,), 0.25),
    ATEN.bernoulli.p: ((x(), 0.75), 0.75),
    ATEN.bernoulli.Tensor: ((x(), half), 0.5),
    ATEN.native_dropout.default: ((half, 0.25, True), 0.5),
    ATEN.randint.default: ((11, [200, 200]), 5.0),
    ATEN.randint.low: ((-5, 6, [200, 200]), 0.0),
    ATEN.randint_like.default: ((x(), 11), 5.0),
    ATEN.randint_like.low_dtype: ((x(), 5, 16), 10.0),
    ATEN.randperm.default: ((20001,), 10000.0),
    ATEN.exponential.default: ((x(), 2.0), 0.5),
    ATEN.multinomial.default: ((torch.tensor([[1.0, 1.0, 2.0]] * 20_000), 1), 1.25),
}


@pytest.mark.parametrize("op", list(RULES), ids=str)
def test_each_operator_has_its_distribution(op):
    args, mean = EXPECTATIONS[op]
    like = op(*args)
    drawn, again = (functional_draw(op, args, {}, stream(), like) for _ in range(2))
    for ours, same, native in zip(*map(pytree.tree_leaves, (drawn, again, like)), strict=True):
        assert torch.equal(ours, same)
        assert (ours.dtype, ours.size(), ours.stride()) == (native.dtype, native.size(), native.stride())
    first = pytree.tree_leaves(drawn)[0].double()
    assert abs(first.mean() - mean) < 0.03 * max(1, abs(mean)), first.mean()


def test_draws_without_replacement_and_by_weight():
    weights = torch.tensor([0.0, 1.0, 2.0, 3.0])
    like = torch.empty(3, dtype=torch.int64)
    drawn = functional_draw(ATEN.multinomial.default, (weights, 3), {}, stream(), like)
    assert sorted(drawn.tolist()) == [1, 2, 3]
    like = torch.empty(30_000, dtype=torch.int64)
    drawn = functional_draw(ATEN.multinomial.default, (weights, 30_000, True), {}, stream(), like)
    assert torch.allclose(drawn.bincount() / 30_000, weights / 6, atol=0.01)
    permutation = functional_draw(
        ATEN.randperm.default, (99,), {}, stream(), torch.empty(99, dtype=torch.int64)
    )
    assert permutation.sort().values.tolist() == list(range(99))


def test_what_is_not_known_is_refused():
    for name in ("poisson", "log_normal", "geometric", "cauchy", "random"):
        with pytest.raises(UnsupportedProgram, match=rf"{name}.* is not known as a function of seed"):
            functional_draw(getattr(ATEN, name).default, (half,), {}, stream(), half)
    with pytest.raises(UnsupportedProgram, match="draws from a generator of its own"):
        functional_draw(ATEN.rand_like.default, (half,), {"generator": torch.Generator()}, stream(), half)
