"""FSDP2 modules through the whole pipeline: the collectives in the graph, and steps that train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from aotdist.api import compile as compile_module
from aotdist.subclasses import fsdp_unshard
from tests.ranks.harness import World
from tests.subclasses.fsdp_models import (
    Net,
    Notes,
    captured,
    different_grads,
    eager_step,
    line,
    same_bits,
    seeded,
    shard_blocks,
    tokens,
)
from tests.subclasses.test_fsdp import Checkpointed, CheckpointedBlock, Looped, crossing, grouped
from tests.subclasses.test_fsdp_meshes import plane, shared_tokens, tensor_parallel

pytestmark = pytest.mark.ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def checkpointed_inside() -> Net:
    model = Net()
    model.blocks = nn.ModuleList(CheckpointedBlock() for _ in range(2))
    return shard_blocks(model, line(2))


class ByName(Net):
    """Finds its blocks by names that the program makes, so that it may read any attribute of anything."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for name in "01":
            x = getattr(self.blocks, name)(x)
        return x * self.gain


TWO: dict[str, Callable[[], nn.Module]] = {
    "bf16": lambda: shard_blocks(Net(), line(2), mp_policy=BF16),
    "not resharded": lambda: shard_blocks(Net(), line(2), reshard_after_forward=False),
    "an input of several units": crossing,
    "a unit used twice": lambda: shard_blocks(Looped(), line(2)),
    "checkpoints inside units": checkpointed_inside,
    "checkpoints around units": lambda: shard_blocks(Checkpointed(), line(2)),
    "units found by name": lambda: shard_blocks(ByName(), line(2)),
    "modules sharded together": lambda: grouped(Net(), BF16),
}
FOUR: dict[str, Callable[[], nn.Module]] = {
    "HSDP": lambda: shard_blocks(Net(), plane(2, 2)),
    "tensor parallel": lambda: tensor_parallel({}, False),
}


def training_case(which: str, syncs: list[bool]) -> None:
    """Steps of SGD, compiled and eager side by side."""
    make, batch = {**TWO, **FOUR}[which], shared_tokens if which == "tensor parallel" else tokens
    eager, compiled = seeded(make), seeded(make)
    params = [list(model.parameters()) for model in (eager, compiled)]
    optimizers = [torch.optim.SGD(owned, 0.1) for owned in params]
    compile_module(compiled, backend="fx")
    for step, sync in enumerate(syncs):
        for model in (eager, compiled):
            model.set_requires_gradient_sync(sync)
        ours = compiled(batch(step))
        ours.backward()
        assert same_bits(eager_step(eager, batch(step)), ours)
        assert not (names := different_grads(eager, compiled)), (step, names)
        for optimizer in optimizers if sync else ():
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("which", TWO)
def test_training_on_two_ranks(world2: World, which: str) -> None:
    world2.run(training_case, which, [True, True])


@pytest.mark.parametrize("which", FOUR)
def test_training_on_four_ranks(world4: World, which: str) -> None:
    world4.run(training_case, which, [True, True])


def test_accumulation(world2: World) -> None:
    world2.run(training_case, "bf16", [False, False, True] * 2)


def uneven_case(which: str, num_sequences: list[list[int]]) -> None:
    """Steps whose batches differ in size from rank to rank; some are new to a rank that is alone with it."""
    make, batch = {**TWO, **FOUR}[which], shared_tokens if which == "tensor parallel" else tokens
    eager, compiled = seeded(make), seeded(make)
    compile_module(compiled, backend="fx", settings={"rank_timeout_s": 20.0})
    for step, rows in enumerate(num_sequences):
        given = batch(step)[: rows[dist.get_rank() * len(rows) // dist.get_world_size()]]
        assert same_bits(eager_step(eager, given), eager_step(compiled, given))
        assert not (names := different_grads(eager, compiled)), (step, names)


def test_a_smaller_batch_on_one_rank(world2: World) -> None:
    """That rank compiles, while the other waits in the collectives of what it has."""
    world2.run(uneven_case, "bf16", [[2, 2], [2, 1], [1, 2], [1, 1]])


def test_a_smaller_batch_on_one_tensor_parallel_group(world4: World) -> None:
    world4.run(uneven_case, "tensor parallel", [[2, 2], [2, 1], [1, 2], [1, 1]])


def lengths_case(lengths: list[list[int]]) -> None:
    """Sequences that differ in length from rank to rank: each rank has one program for all that changed."""
    eager, compiled = (seeded(TWO["bf16"]) for _ in range(2))
    compile_module(compiled, backend="fx", dynamic="auto", settings={"rank_timeout_s": 20.0})
    for step, of_ranks in enumerate(lengths):
        given = tokens(step).repeat(1, 3)[:, : of_ranks[dist.get_rank()]].contiguous()
        assert same_bits(eager_step(eager, given), eager_step(compiled, given))
        assert not (names := different_grads(eager, compiled)), (step, names)
    assert len(compiled.graphs) == 2


def test_lengths_that_differ_by_rank(world2: World) -> None:
    world2.run(lengths_case, [[4, 4], [4, 6], [6, 5], [9, 6], [4, 9]])


def hooks_case() -> None:
    """Hooks of a shard's gradient are not called where FSDP2 assigns it; those of what is accumulated are."""
    called: list[list[str]] = []
    for compiles in (False, True):
        model, calls = seeded(lambda: shard_blocks(Net(), line(2))), list[str]()
        called.append(calls)
        param = model.blocks[0].up.weight
        handle = param.register_hook(lambda grad, calls=calls: (calls.append("hook"), grad * 2)[1])
        param.register_post_accumulate_grad_hook(lambda _, calls=calls: calls.append("accumulated"))
        if compiles:
            compile_module(model, backend="fx")
        for step in range(2):
            eager_step(model, tokens(step))
        calls.append(f"{param.grad.full_tensor().sum().item()}")
        param.to_local().sum().backward()
        handle.remove()
        param.to_local().sum().backward()
        calls.append(f"{param.grad.full_tensor().sum().item()}")
    assert called[0] == called[1] and called[0].count("hook") == 1, called


def test_hooks_of_shards(world2: World) -> None:
    world2.run(hooks_case)


def block_by_block_case() -> None:
    """Blocks compiled one by one; FSDP2's own hooks stay at work in the root around them."""
    eager, compiled = (seeded(lambda: shard_blocks(Net(), line(2), mp_policy=BF16)) for _ in range(2))
    for block in compiled.blocks:
        compile_module(block, backend="fx")
    for step in range(3):
        assert same_bits(eager_step(eager, tokens(step)), eager_step(compiled, tokens(step)))
        assert not (names := different_grads(eager, compiled)), (step, names)


def test_block_by_block(world2: World) -> None:
    world2.run(block_by_block_case)


def evaluation_case() -> None:
    """Evaluation takes a graph of its own, and sees what the optimizer wrote."""
    eager, compiled = (seeded(lambda: shard_blocks(Net(), line(2))) for _ in range(2))
    compile_module(compiled, backend="fx")
    for step in range(2):
        for model in (eager, compiled):
            eager_step(model, tokens(step))
            torch.optim.SGD(model.parameters(), 0.1).step()
        with torch.no_grad():
            assert same_bits(eager(tokens(9)), compiled(tokens(9)))


def test_evaluation(world2: World) -> None:
    world2.run(evaluation_case)


def tags_case() -> None:
    """Each unit's chains carry its name; what a resharding unit gathers is to be gathered again."""
    model = seeded(lambda: shard_blocks(Net(), line(2)))
    notes = Notes()
    with mock.patch.object(fsdp_unshard, "annotate", notes), captured(model):
        loss = model(tokens())
        gathers = Counter(notes.seen)
        notes.seen.clear()
        loss.backward()
    assert gathers == {
        ("(root)", "must_save"): 3,
        ("blocks.0", "must_recompute"): 5,
        ("blocks.1", "must_recompute"): 5,
    }
    assert Counter(notes.seen) == {("(root)", None): 2, ("blocks.0", None): 4, ("blocks.1", None): 4}


def test_tags(world2: World) -> None:
    world2.run(tags_case)


def graph_case() -> None:
    """A gather and a reduction for each parameter that needs one, tagged with its unit."""
    model = seeded(lambda: shard_blocks(Net(), line(2)))
    compile_module(model, backend="fx")
    model(tokens()).backward()
    (graphs,) = model.graphs
    nodes = [
        node for gm in graphs.values() for node in gm.graph.nodes if "_c10d_functional" in str(node.target)
    ]
    units = {node.meta.get("unit") for node in nodes}
    assert units == {"(root)", "blocks.0", "blocks.1"}


def test_units_in_the_graph(world2: World) -> None:
    world2.run(graph_case)
