"""A captured FSDP2 step computes what FSDP2's own hooks compute, bit for bit."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import aotdist
from aotdist.codegen.emit import Emitter
from tests.ranks.harness import World
from tests.subclasses.fsdp_models import (
    Block,
    Net,
    captured,
    compare,
    compare_on,
    different_grads,
    eager_step,
    line,
    same_bits,
    seeded,
    shard_blocks,
    tokens,
)

pytestmark = pytest.mark.ranks


PRECISIONS = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16},
    "bf16 reduced in fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "fp32 reduced in bf16": {"reduce_dtype": torch.bfloat16},
    "fp16, divided before and after": {"param_dtype": torch.float16},
    "bf16, fp32 out": {"param_dtype": torch.bfloat16, "output_dtype": torch.float32},
    "bf16, inputs as they come": {"param_dtype": torch.bfloat16, "cast_forward_inputs": False},
}


def precision_case(policy: dict[str, Any], options: dict[str, Any] | None = None) -> None:
    mp_policy = MixedPrecisionPolicy(**policy)
    compare(lambda: shard_blocks(Net(), line(2), mp_policy=mp_policy, **(options or {})))


@pytest.mark.parametrize("policy", PRECISIONS.values(), ids=PRECISIONS.keys())
def test_mixed_precision(world2: World, policy: dict[str, Any]) -> None:
    world2.run(precision_case, policy)


@pytest.mark.parametrize("reshard", [True, False])
def test_reshard_after_forward(world2: World, reshard: bool) -> None:
    world2.run(precision_case, {}, {"reshard_after_forward": reshard})


def columns(param: nn.Parameter) -> Shard | None:
    """Shard what divides by two on the second dimension."""
    return Shard(1) if param.dim() == 2 and param.size(1) % 2 == 0 else None


def columns_case() -> None:
    precision_case({"param_dtype": torch.bfloat16}, {"shard_placement_fn": columns})


def test_another_shard_dimension(world2: World) -> None:
    world2.run(columns_case)


class Checkpointed(Net):
    """Blocks run again in backward: with their hooks around the checkpoint, or inside it."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x * self.gain


class CheckpointedBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def checkpoint_case(inside: bool, reshard: bool) -> None:
    def make() -> Net:
        model = Net() if inside else Checkpointed()
        if inside:
            model.blocks = nn.ModuleList(CheckpointedBlock() for _ in range(2))
        return shard_blocks(model, line(2), reshard_after_forward=reshard)

    compare(make)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
def test_activation_checkpointing(world2: World, inside: bool, reshard: bool) -> None:
    world2.run(checkpoint_case, inside, reshard)


class Looped(Net):
    """The same blocks twice: each use is gathered, and reduced, by itself."""

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x * self.gain


@pytest.mark.parametrize("reshard", [True, False])
def test_a_unit_used_twice(world2: World, reshard: bool) -> None:
    world2.run(looped_case, reshard)


def looped_case(reshard: bool) -> None:
    compare(lambda: shard_blocks(Looped(), line(2), reshard_after_forward=reshard))


def grouped(model: Net, policy: MixedPrecisionPolicy) -> Net:
    """The embedding and its tied head as one unit, as FSDP2 asks for tied modules in different units."""
    mesh = line(2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard([model.embed, model.head], mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


class HeadApart(Net):
    """Never calls `head`, so that the group of `embed` and `head` is left incomplete."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.hidden(tokens).float().logsumexp(-1).mean()


def grouped_case(cls: type[Net]) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    compare(lambda: grouped(cls(), policy))


@pytest.mark.parametrize("cls", [Net, HeadApart])
def test_modules_sharded_together(world2: World, cls: type[Net]) -> None:
    world2.run(grouped_case, cls)


class TwoDoors(Net):
    """A second forward method."""

    def embed_only(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens).sum()


def forward_method_case() -> None:
    def make() -> Net:
        model = shard_blocks(TwoDoors(), line(2))
        register_fsdp_forward_method(model, "embed_only")
        return model

    eager, compiled = seeded(make), seeded(make)
    eager(tokens())  # the root must be initialised by its forward in eager
    eager.embed_only(tokens()).backward()
    with captured(compiled):
        compiled.embed_only(tokens()).backward()
    assert different_grads(eager, compiled) == []
    assert "_pre_forward" not in vars(compiled._get_fsdp_state())


def test_registered_forward_method(world2: World) -> None:
    world2.run(forward_method_case)


def half_frozen_case() -> None:
    def make() -> Net:
        model = Net()
        model.blocks[0].requires_grad_(False)
        model.embed.requires_grad_(False)
        model.blocks[1].register_parameter("bytes", nn.Parameter(torch.arange(7, dtype=torch.int8), False))
        return shard_blocks(model, line(2))

    eager, compiled = compare(make)
    for model in (eager, compiled):
        model.blocks[0].requires_grad_(True)
        model.blocks[1].requires_grad_(False)
    compare_on(eager, compiled)


def test_frozen_units_and_thawing(world2: World) -> None:
    world2.run(half_frozen_case)


def training_case() -> None:
    """Three steps of clipping and AdamW; gradients set to zero once, to None once."""
    eager, compiled = (seeded(lambda: shard_blocks(Net(), line(2))) for _ in range(2))
    optimizers = [torch.optim.AdamW(model.parameters(), 0.1) for model in (eager, compiled)]
    for step in range(3):
        compare_on(eager, compiled, step)
        for model, optimizer in zip((eager, compiled), optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 0)
    ours, theirs = compiled.state_dict(), eager.state_dict()
    assert list(ours) == list(theirs)
    assert all(same_bits(ours[key]._local_tensor, theirs[key]._local_tensor) for key in ours)


def test_training_and_state_dict(world2: World) -> None:
    world2.run(training_case)


def unsharded_before_case() -> None:
    """What `unshard()`, or an eager step told not to reshard, leaves gathered is given up before the call."""
    eager, compiled = (seeded(lambda: shard_blocks(Net(), line(2))) for _ in range(2))
    params = [*eager.parameters(), *compiled.parameters()]  # sharded; later, whole ones are registered
    compiled.set_reshard_after_backward(False)
    for model in (eager, compiled):
        eager_step(model, tokens())
    assert compiled.blocks[0]._get_fsdp_state()._fsdp_param_groups[0].is_unsharded
    with torch.no_grad():
        for param in params:
            param.mul_(2)
    compiled.blocks[1].unshard(async_op=True)
    compare_on(eager, compiled, 1)


def test_units_left_unsharded(world2: World) -> None:
    world2.run(unsharded_before_case)


class Reader(nn.Module):
    """Reads, twice, what all readers read, and takes something that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, *, memory: torch.Tensor, idle: list[torch.Tensor]) -> torch.Tensor:
        return x + torch.tanh(self.key(memory)) * self.value(memory)


class Crossing(Net):
    """As a decoder does, whose every block reads what the encoder wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.readers = nn.ModuleList(Reader() for _ in range(3))
        self.idle = nn.Parameter(torch.ones(2, 3))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        memory = super().hidden(tokens)
        x = memory
        for reader in self.readers:
            x = reader(x, memory=memory, idle=[self.idle * 2])
        return x


def crossing(policy: dict[str, Any] | None = None) -> nn.Module:
    model = Crossing()
    for reader in model.readers:
        fully_shard(reader, mesh=line(2), mp_policy=MixedPrecisionPolicy(**(policy or {})))
    return shard_blocks(model, line(2), mp_policy=MixedPrecisionPolicy(**(policy or {})))


def crossing_case(policy: dict[str, Any]) -> None:
    eager, _ = compare(lambda: crossing(policy))
    assert eager.idle.grad is not None and not eager.idle.grad._local_tensor.any()


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_an_input_of_several_units(world2: World, name: str) -> None:
    """Its gradients meet inside of each unit first; one that a unit does not use gets zeros from there."""
    world2.run(crossing_case, PRECISIONS[name])


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch) * 2


class WithLogits(Net):
    """A loss, and the logits that it is made of."""

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.hidden(tokens)).float()
        return logits.logsumexp(-1).mean(), logits


def logits_case() -> None:
    """The backward of the loss is there from the first call on; that of both is compiled by both ranks."""
    eager, compiled = (seeded(lambda: shard_blocks(WithLogits(), line(2))) for _ in range(2))
    aotdist.compile(compiled, backend="fx")
    spied = partial(patch.object, Emitter, "another_backward", autospec=True)
    for step in range(4):
        with spied(side_effect=Emitter.another_backward) as on_demand:
            for model in (eager, compiled):
                loss, logits = model(tokens(step))
                (loss if step < 2 else loss + logits.square().mean()).backward()
        assert on_demand.call_count == (step == 2)
        assert not (names := different_grads(eager, compiled)), (step, names)


def given_case() -> None:
    eager, given = (seeded(lambda: shard_blocks(Net(), line(2))) for _ in range(2))
    compiled = aotdist.compile(loss_of, backend="fx")
    for step in range(2):
        expected, loss = loss_of(eager, tokens(step)), compiled(given, tokens(step))
        assert same_bits(expected, loss)
        expected.backward()
        loss.backward()
        assert not (names := different_grads(eager, given)), (step, names)


def both_cases() -> None:
    given_case()
    logits_case()


def test_a_sharded_model_is_an_argument_or_returns_logits_too(world2: World) -> None:
    world2.run(both_cases)


class Packed(nn.Module):
    """Attention in rows of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        heads = self.inner(self.embed(tokens)).unflatten(-1, (2, 4)).transpose(1, 2)
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return self.head(attended.transpose(1, 2).flatten(-2)).values()


def packed(step: int) -> torch.Tensor:
    """Rows of other lengths on each rank."""
    lengths = torch.tensor([2 + step, 5, 3 + 2 * torch.distributed.get_rank()])
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
    return torch.nested.nested_tensor_from_jagged(torch.arange(int(lengths.sum())) % 10, offsets)


def jagged_case() -> None:
    eager, compiled = (seeded(Packed) for _ in range(2))
    for model in (eager, compiled):
        fully_shard(model.inner, mesh=line(2))
        fully_shard(model, mesh=line(2))
    aotdist.compile(compiled, backend="fx")
    for step in range(4):
        expected, logits = eager(packed(step)), compiled(packed(step))
        assert same_bits(expected, logits)
        expected.square().mean().backward()
        logits.square().mean().backward()
        assert not (names := different_grads(eager, compiled)), (step, names)
    assert len(compiled.explain().artifacts) == 1


def test_jagged_batches_of_other_lengths_on_each_rank(world2: World) -> None:
    world2.run(jagged_case)
