"""From every placement to every placement, and back for the gradients."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.ranks.harness import World
from tests.subclasses.dtensors import S0, S1, SETTLED, SIZES, Make, P, R, compare, grid, leaf, mine

pytestmark = pytest.mark.ranks

PARTIAL: dict[str, Placement] = {
    "P": P,
    "Pavg": Partial("avg"),
    "Pmax": Partial("max"),
    "Pmin": Partial("min"),
    "Pproduct": Partial("product"),
}
STRIDED: dict[str, Placement] = {"SS0": _StridedShard(0, split_factor=2)}
EACH: Mapping[str, Placement] = {**SETTLED, **PARTIAL}


def to_each(*targets: Sequence[Placement]) -> Any:
    return lambda x: [x.redistribute(placements=target) for target in targets]


def one_axis_case(source: str, size: str) -> None:
    placement = EACH[source]
    targets = [[target] for target in {*SETTLED.values(), placement}]
    compare(to_each(*targets), leaf(SIZES[size], placement))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("source", EACH)
def test_on_two_ranks(world2: World, source: str, size: str) -> None:
    world2.run(one_axis_case, source, size)


@pytest.mark.parametrize("source", EACH)
def test_on_four_ranks(world4: World, source: str) -> None:
    """Rows for three of them: the last has none."""
    world4.run(one_axis_case, source, "uneven")


PAIRS = [*itertools.product((R, S0, S1, P), repeat=2)]


def two_axes_case(source: tuple[Placement, Placement], size: str, every: int) -> None:
    targets = [target for target in PAIRS if P not in target or target == source]
    chosen = targets[PAIRS.index(source) % every :: every]
    compare(to_each(*chosen), leaf(SIZES[size], *source), mesh=grid(2, 2))


@pytest.mark.parametrize("source", PAIRS, ids=lambda pair: " ".join(map(str, pair)))
def test_on_two_axes(world4: World, source: tuple[Placement, Placement]) -> None:
    world4.run(two_axes_case, source, "uneven", 4)


@pytest.mark.sweep
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("source", PAIRS, ids=lambda pair: " ".join(map(str, pair)))
def test_on_two_axes_all(world4: World, source: tuple[Placement, Placement], size: str) -> None:
    world4.run(two_axes_case, source, size, 1)


def back_and_forth_case() -> None:
    """Placements that only come up on the way: strided shards, and back."""

    def program(x: torch.Tensor) -> Any:
        strided = x.redistribute(placements=[_StridedShard(0, split_factor=2)])
        return strided * strided, strided.redistribute(placements=[S1]), strided.full_tensor()

    for placement in SETTLED.values():
        compare(program, leaf((8, 3), placement))


def test_strided_shards_made_inside(world2: World) -> None:
    world2.run(back_and_forth_case)


def strided(size: tuple[int, ...], *placements: Placement) -> Make:
    """A leaf of strided shards, from the local part of each rank."""
    return lambda mesh: DTensor.from_local(mine(size), mesh, placements).detach().requires_grad_()


def strided_case() -> None:
    """As FSDP2 leaves the parameters of tensor parallelism."""
    pair = (_StridedShard(0, split_factor=2), Shard(0))
    targets = [(R, R), (R, S0), (S0, S0), (S1, S0), (S1, R), pair]
    compare(to_each(*targets), strided((4, 3), *pair), mesh=grid(2, 2))
    compare(lambda w: (w.full_tensor(), w * w, w.sum(), w.norm()), strided((4, 3), *pair), mesh=grid(2, 2))


def test_strided_shards(world4: World) -> None:
    world4.run(strided_case)


OPTIONS: dict[str, dict[str, Any]] = {
    "gathered in bf16": {"forward_dtype": torch.bfloat16, "backward_dtype": torch.float32},
    "reduced in bf16": {"forward_dtype": torch.float32, "backward_dtype": torch.bfloat16},
    "waited for when it is used": {"async_op": True},
}


def options_case(which: str) -> None:
    compare(lambda x: x.redistribute(placements=[R], **OPTIONS[which]) * 2, leaf(SIZES["even"], S0))


@pytest.mark.parametrize("which", OPTIONS)
def test_options(world2: World, which: str) -> None:
    world2.run(options_case, which)


COLLECTIVES: dict[tuple[Placement, Placement], tuple[str, ...]] = {
    (S0, R): ("all_gather_into_tensor",),
    (R, S0): (),
    (P, R): ("all_reduce",),
    (P, S0): ("reduce_scatter_tensor",),
}


def graph_case() -> None:
    """A graph holds what runs on this rank's part, and nothing of how that was found out."""
    for (source, target), expected in COLLECTIVES.items():
        for size in SIZES.values():
            made = leaf(size, source)
            uncleaned = compare(to_each([target]), made, backward=False, disabled_passes={"cleanup"})
            (graphs,) = uncleaned.graphs
            nodes = [node for node in graphs["forward"].graph.nodes if node.op == "call_function"]
            assert all(node.users or node.target.__name__ == "getitem" for node in nodes)
            ops = Counter(node.target._opname for node in nodes if "c10d" in str(node.target))
            assert ops == Counter([*expected, *("wait_tensor" for _ in expected)])
            beside = [node for node in nodes if "c10d" not in str(node.target)]
            assert len(beside) <= (3 if size == SIZES["even"] else 9), beside


def test_nothing_else_is_in_the_graph(world2: World) -> None:
    world2.run(graph_case)


def kept_by_a_checkpoint_case() -> None:
    kept = [torch.ops._c10d_functional.reduce_scatter_tensor.default]
    contexts = partial(create_selective_checkpoint_contexts, kept)

    def scattered(x: DTensor) -> torch.Tensor:
        return x.redistribute(placements=[S0]).to_local().sin().exp()

    compare(lambda x: [checkpoint(scattered, x, use_reentrant=False, context_fn=contexts)], leaf((4, 6), P))


def test_a_checkpoint_keeps_what_it_waits_for(world2: World) -> None:
    """As torchtitan's selective checkpoints under sequence parallelism: what recomputes waits again."""
    world2.run(kept_by_a_checkpoint_case)
