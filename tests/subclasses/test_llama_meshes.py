"""A Llama on two and four ranks: two steps, compiled and eager side by side, equal bit for bit.

Eager is deterministic in all of these: the collectives are the same, over the same buffers. (With uneven
shards on more than two ranks gloo's sums depend on the place in the buffer; see `test_four_shards`.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch.distributed.tensor import DTensor

import aotdist
from tests.ranks.harness import World
from tests.subclasses.dtensors import grid, numbers
from tests.subclasses.fsdp_models import same_bits
from tests.subclasses.llama_meshes import SPREADINGS, Llama, batch, copy_of, line, shard_parameters
from tests.subclasses.ring_attention import ring, rotated, unsharded

pytestmark = pytest.mark.ranks


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placements(tensor: torch.Tensor) -> Any:
    return getattr(tensor, "placements", None)


def train(
    make: Callable[[], Llama],
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    around: Callable[[Llama, torch.Tensor, torch.Tensor], AbstractContextManager[Any]],
) -> Any:
    """Steps of AdamW of both: the same losses, gradients and parameters. Returns the compiled model."""
    models = [make() for _ in range(2)]
    eager, compiled = models
    aotdist.compile(compiled, backend="fx")
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2, foreach=False) for model in models]
    for step in range(2):
        losses: list[torch.Tensor] = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            tokens, targets = data(step)
            with around(model, tokens, targets):
                losses.append(model(tokens, targets))
                losses[-1].backward()
        assert placements(losses[0]) == placements(losses[1])
        assert same_bits(*map(local, losses)), (step, losses)
        for (name, p), (_, q) in zip(eager.named_parameters(), compiled.named_parameters(), strict=True):
            assert placements(p.grad) == placements(q.grad), (step, name)
            assert same_bits(local(p.grad), local(q.grad)), (step, name)
        for optimizer in optimizers:
            optimizer.step()
    (_,) = compiled.graphs
    return compiled


def spread_case(which: str, tie_head: bool) -> None:
    spreading = SPREADINGS[which]
    _, mesh = spreading.make(dist.get_world_size())
    train(
        lambda: spreading.make(dist.get_world_size(), tie_head=tie_head)[0],
        lambda step: batch(step, copy_of(mesh)),
        lambda *_: spreading.around(),
    )


def some(*chosen: str) -> Any:
    """All spreadings, of which all but these are left to the sweep."""
    marks = {which: () if which in chosen else pytest.mark.sweep for which in SPREADINGS}
    return pytest.mark.parametrize(
        "which", [pytest.param(which, marks=mark) for which, mark in marks.items()]
    )


@some("tensor parallel", "sequence parallel", "loss parallel", "FSDP2")
def test_two_ranks(world2: World, which: str) -> None:
    world2.run(spread_case, which, True, timeout=100)


@some("HSDP", "FSDP2 and sequence parallel", "FSDP2 and loss parallel")
def test_four_ranks(world4: World, which: str) -> None:
    world4.run(spread_case, which, False, timeout=100)


def collectives(model: Any) -> Counter[str]:
    """The collectives of a compiled step, by operator."""
    (graphs,) = model.graphs
    nodes = [node for name in ("forward", "backward") for node in graphs[name].graph.nodes]
    ops = [node.target._opname for node in nodes if "_c10d_functional" in str(node.target)]
    return Counter(op for op in ops if op != "wait_tensor")


def ring_case(method: str, sharded: bool) -> None:
    """`context_parallel` around the step; the parameters sharded over the same ranks, or whole."""
    mesh = line(dist.get_world_size(), "dp")

    def make() -> Llama:
        model = Llama()
        if sharded:
            shard_parameters(model, mesh)
        return model

    def around(model: Llama, *data: torch.Tensor) -> AbstractContextManager[Any]:
        return ring(mesh, *data, model.decoder.rope.table, dims=[1, 1, 1])

    with rotated(method):
        model = train(make, batch, around)
    found, rounds = collectives(model), dist.get_world_size()
    layers = len(model.decoder.blocks)
    if not sharded:
        # Gradients of keys and values go the whole way round.
        keys = {"all_to_all_single": layers * rounds}
        expected = {
            "allgather": keys | {"all_gather_into_tensor": 2 * layers},
            "alltoall": {"all_to_all_single": layers * (rounds + 2 * (rounds - 1))},
        }
        assert found == expected[method]


@pytest.mark.parametrize(
    ("method", "sharded"), [("allgather", False), ("alltoall", False), ("allgather", True)]
)
def test_context_parallel(world2: World, method: str, sharded: bool) -> None:
    world2.run(ring_case, method, sharded, timeout=100)


@pytest.mark.sweep
@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_context_parallel_on_four_ranks(world4: World, sharded: bool) -> None:
    world4.run(ring_case, "alltoall", sharded, timeout=100)


def attention_case() -> None:
    """Inside of the context, outside of it, and entered by the program: an artifact each."""
    mesh = grid()
    whole = [numbers((2, 4, 16, 4), seed) for seed in range(3)]
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def enter(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with ring(mesh, q, k, v, dims=[2, 2, 2]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with ring(mesh, *(parts := [part.clone() for part in whole]), dims=[2, 2, 2]):
        parts = [part.clone() for part in parts]
    compiled = aotdist.compile(attend, backend="fx")
    for inside in (False, True, False, True):
        with ring(mesh, torch.zeros(16), dims=[0]) if inside else nullcontext():
            eager, ours = attend(*parts), compiled(*parts)
        assert same_bits(eager, ours)
        if inside:
            torch.testing.assert_close(unsharded(mesh, ours), expected)
    assert len(compiled.artifacts) == 2
    found = [fn(*(part.clone() for part in whole)) for fn in (enter, aotdist.compile(enter, backend="fx"))]
    assert same_bits(*found)


def test_the_context_is_part_of_what_is_compiled_for(world2: World) -> None:
    world2.run(attention_case)
