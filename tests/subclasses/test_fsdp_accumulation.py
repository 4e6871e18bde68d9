"""`set_requires_gradient_sync(False)`: eager and captured steps mix, in any order, and lose no gradient."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage

from aotdist.api import compile as compile_module
from aotdist.subclasses.fsdp import MODULE_RULE
from tests.ranks.harness import World
from tests.subclasses.fsdp_models import (
    Net,
    captured,
    captured_step,
    different_grads,
    eager_step,
    fsdp_modules,
    line,
    same_bits,
    seeded,
    shard_blocks,
    tokens,
)

pytestmark = pytest.mark.ranks

STEPS = {"e": eager_step, "c": captured_step}
POLICIES = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16},
    "bf16 reduced in fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}


def accumulate(model: Net, kinds: str, cycles: int) -> list[torch.Tensor]:
    """Cycles of steps of these kinds, of which only the last reduces."""
    losses = []
    for step, kind in enumerate(kinds * cycles):
        model.set_requires_gradient_sync((step + 1) % len(kinds) == 0)
        losses.append(STEPS[kind](model, tokens(step)))
    return losses


def mixed_case(kinds: str, policy: dict[str, Any]) -> None:
    def make() -> Net:
        return shard_blocks(Net(), line(2), mp_policy=MixedPrecisionPolicy(**policy))

    eager, mixed = seeded(make), seeded(make)
    theirs = accumulate(eager, "e" * len(kinds), cycles=2)
    ours = accumulate(mixed, kinds, cycles=2)
    assert all(same_bits(a, b) for a, b in zip(theirs, ours, strict=True))
    assert not (names := different_grads(eager, mixed)), names
    assert mixed.unused.grad is None


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("kinds", ["".join(kinds) for kinds in product("ec", repeat=3)][1:])
def test_eager_and_captured_steps_mix(world2: World, kinds: str, policy: dict[str, Any]) -> None:
    world2.run(mixed_case, kinds, policy)


def pipeline_case(policy: dict[str, Any]) -> None:
    def trained(step: Callable[..., torch.Tensor]) -> Net:
        model = seeded(lambda: shard_blocks(Net(), line(2), mp_policy=MixedPrecisionPolicy(**policy)))
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        for microbatch in range(3):
            step(model, tokens(microbatch))
        stage = cast(PipelineStage, SimpleNamespace(submod=model))
        PipelineStage.perform_reduce_grad(stage, 1)
        return model

    assert not (names := different_grads(trained(eager_step), trained(captured_step))), names


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_a_pipelines_schedule_reduces_by_fsdp2_itself(world2: World, policy: dict[str, Any]) -> None:
    world2.run(pipeline_case, policy)


def inductor_case() -> None:
    def make() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(6, 32), nn.GELU(), nn.Linear(32, 1))
        fully_shard(model, mesh=line(2))
        return model

    eager, compiled = seeded(make), compile_module(seeded(make), backend="inductor")
    for step in range(4):
        for model in (eager, compiled):
            model.set_requires_gradient_sync(step % 2 == 1)
            torch.manual_seed(step)
            model(torch.randn(8, 6)).square().sum().backward()
    for theirs, ours in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_local(), theirs.grad.to_local())


def test_accumulation_by_inductor(world2: World) -> None:
    world2.run(inductor_case)


class Skipping(Net):
    """Leaves out its last block when told so."""

    skip = False

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks[: 1 if self.skip else 2]:
            x = block(x)
        return x * self.gain


def used_in_one_step_case() -> None:
    """A block that only some accumulating steps use keeps what it has, and zeros are no gradients."""

    def make() -> Skipping:
        return shard_blocks(Skipping(), line(2))

    eager, compiled = seeded(make), seeded(make)
    for model, step in ((eager, eager_step), (compiled, captured_step)):
        for number, (sync, skip) in enumerate([(False, True), (False, False), (False, True), (True, False)]):
            model.skip = skip
            model.set_requires_gradient_sync(sync)
            step(model, tokens(number))
    assert not (names := different_grads(eager, compiled)), names
    for model, step in ((eager, eager_step), (compiled, captured_step)):
        model.zero_grad()
        model.skip = True
        for sync in (False, True):
            model.set_requires_gradient_sync(sync)
            step(model, tokens())
    assert not (names := different_grads(eager, compiled)), names
    assert eager.blocks[1].up.weight.grad is None


def test_a_block_that_some_steps_use(world2: World) -> None:
    world2.run(used_in_one_step_case)


def forgotten_case() -> None:
    """The step that reduces leaves out a block, and gives it the gradients of the steps before."""
    eager, compiled = (seeded(lambda: shard_blocks(Skipping(), line(2))) for _ in range(2))
    for model, step in ((eager, eager_step), (compiled, captured_step)):
        for sync in (False, True):
            model.skip = sync
            model.set_requires_gradient_sync(sync)
            step(model, tokens())
    assert not (names := different_grads(eager, compiled)), names
    assert compiled.blocks[1].up.bias.grad is not None


def test_an_accumulated_gradient_is_never_forgotten(world2: World) -> None:
    world2.run(forgotten_case)


def two_forwards_case(policy: dict[str, Any]) -> None:
    """Two forwards, of which some leave out a block, then both backwards: each gradient is added once.

    The backwards come in both orders, by turns.
    """

    def make() -> Skipping:
        return shard_blocks(Skipping(), line(2), mp_policy=MixedPrecisionPolicy(**policy))

    eager, compiled = seeded(make), compile_module(seeded(make), backend="fx")
    for number, sync in enumerate([True, False, False, True, False, True]):
        for model in (eager, compiled):
            model.set_requires_gradient_sync(sync)
            losses = []
            for k, skip in enumerate([number > 0, number % 2 == 0]):
                model.skip = skip
                losses.append(model(tokens(2 * number + k)))
            for loss in losses if number % 2 else reversed(losses):
                loss.backward()
        assert not (names := different_grads(eager, compiled)), (number, names)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_two_forwards_before_their_backwards(world2: World, policy: dict[str, Any]) -> None:
    world2.run(two_forwards_case, policy)


def evaluation_case() -> None:
    """An evaluation between accumulating steps changes nothing, and is specialised on nothing."""
    model = seeded(lambda: shard_blocks(Net(), line(2)))
    with torch.no_grad():
        MODULE_RULE.prepare(model)
        before = MODULE_RULE.flags(model)
    model.set_requires_gradient_sync(False)
    captured_step(model, tokens())
    kept = {id(record): record.unsharded_accumulated_grad for record in records(model)}
    with torch.no_grad():
        with captured(model):
            model(tokens())
        assert list(MODULE_RULE.lifted(model)) == []
        model.set_requires_gradient_sync(True)
        assert MODULE_RULE.flags(model) == before
    assert all(record.unsharded_accumulated_grad is kept[id(record)] for record in records(model))


def records(model: Net) -> list[Any]:
    groups = [
        group for module in fsdp_modules(model) for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    return [record for group in groups for record in group.fsdp_params]


def test_evaluation_while_accumulating(world2: World) -> None:
    world2.run(evaluation_case)


def flags_case() -> None:
    """The flags tell apart the programs; the accumulators are lifted under their parameters' names."""
    model = seeded(lambda: shard_blocks(Net(), line(2)))
    MODULE_RULE.prepare(model)
    seen = [MODULE_RULE.flags(model)]
    assert list(MODULE_RULE.lifted(model)) == []
    model.set_requires_gradient_sync(False)
    MODULE_RULE.prepare(model)
    seen.append(MODULE_RULE.flags(model))
    lifted = {path: getattr(owner, attribute) for path, owner, attribute in MODULE_RULE.lifted(model)}
    trainable = [name for name, param in model.named_parameters() if param.requires_grad]
    assert sorted(lifted) == sorted(f"{name}.accumulated_grad" for name in trainable)
    assert all(torch.signbit(tensor).all() and not tensor.any() for tensor in lifted.values())
    model.set_requires_gradient_sync(True)
    seen.append(MODULE_RULE.flags(model))
    model.set_reshard_after_forward(False)
    seen.append(MODULE_RULE.flags(model))
    model.set_gradient_divide_factor(2.0)
    seen.append(MODULE_RULE.flags(model))
    assert len(set(seen)) == 5 and all(isinstance(hash(flags), int) for flags in seen)


def test_flags(world2: World) -> None:
    world2.run(flags_case)


class Layers(nn.Sequential):
    """Uneven shards; every parameter gets a gradient at every step, as FSDP2's own buffer requires."""

    def __init__(self) -> None:
        super().__init__(nn.Embedding(11, 5), nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens).float().square().mean()


def replicated(model: nn.Module, shards: int, policy: dict[str, Any]) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicate", "shard"))
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**policy)}
    for block in list(model)[1::2] if isinstance(model, Layers) else model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


SCHEDULE = [
    (True, False),
    (True, False),
    (True, True),
    (False, False),
    (True, False),
    (True, True),
    (True, True),
]
"""Of each step, whether gradients are reduced among shards, and whether among replicas."""


def replicas_case(policy: dict[str, Any]) -> None:
    """Gradients are summed among shards at each step, and among replicas at the last."""
    eager = seeded(lambda: replicated(Net(), 2, policy))
    ours = compile_module(seeded(lambda: replicated(Net(), 2, policy)), backend="fx")
    for step, (sync, all_reduce) in enumerate(SCHEDULE):
        for model in (eager, ours):
            model.set_requires_gradient_sync(sync)
            model.set_requires_all_reduce(all_reduce)
            model(tokens(step)).backward()
            if all_reduce:
                with torch.no_grad():
                    for param in model.parameters():
                        if param.grad is not None:
                            param -= 0.1 * param.grad
        assert not (names := different_grads(eager, ours)), (step, names)
        assert (eager.embed.weight.grad is None) is (step < 2)


@pytest.mark.parametrize(
    "name",
    ["bf16 reduced in fp32", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("fp32", "bf16"))],
)
def test_replicas_are_summed_at_the_last_step(world4: World, name: str) -> None:
    world4.run(replicas_case, POLICIES[name])


def mixed_replicas_case(kinds: str) -> None:
    eager, mixed = (seeded(lambda: replicated(Layers(), 1, POLICIES["bf16"])) for _ in range(2))
    for step, kind in enumerate(kinds * 2):
        for model, run in ((eager, eager_step), (mixed, STEPS[kind])):
            model.set_requires_all_reduce((step + 1) % len(kinds) == 0)
            run(model, tokens(step))
    assert eager[0].weight.grad is not None
    assert not (names := different_grads(eager, mixed)), names


@pytest.mark.parametrize("kinds", ["ece", "cec", "ecc"])
def test_eager_and_captured_steps_mix_among_replicas(world2: World, kinds: str) -> None:
    world2.run(mixed_replicas_case, kinds)


def left_out_case() -> None:
    """What a block has from earlier steps waits for its next gradient, where the last step leaves it out."""
    model = compile_module(seeded(lambda: replicated(Skipping(), 1, {})), backend="fx")
    steps = [(False, False), (True, True), (False, True)]
    for number, (skip, all_reduce) in enumerate(steps):
        model.skip = skip
        model.set_requires_all_reduce(all_reduce)
        model(tokens(number)).backward()
        assert (model.blocks[1].up.weight.grad is None) is (number < 2)
    once = seeded(lambda: replicated(Skipping(), 1, {}))
    for number in (0, 2):
        once.set_requires_all_reduce(number == 2)
        once(tokens(number)).backward()
    assert same_bits(model.blocks[1].up.weight.grad.to_local(), once.blocks[1].up.weight.grad.to_local())


def test_a_block_that_the_last_step_leaves_out(world2: World) -> None:
    world2.run(left_out_case)
