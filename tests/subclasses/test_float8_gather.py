"""Weights that FSDP2 gathers in 8 bits: eagerly, captured, and the same bits as those of one process."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import aotdist
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.subclasses.float8_gather import Float8GatherWeight
from aotdist.subclasses.float8_tensor import E4M3, Float8Tensor, amax_of, quantise, scale_for
from tests.ranks.harness import World, fresh_world
from tests.subclasses.fsdp_models import line, same_bits, seeded

ranks = pytest.mark.ranks


class Block(nn.Module):
    """48 and 80 rows: even shards on two ranks, and on four."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 80)
        self.down = nn.Linear(80, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two units, a root with a layer of its own, and a weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.mix = nn.Linear(32, 32)
        self.tied = nn.Linear(32, 48, bias=False)
        self.tied_too = nn.Linear(32, 48, bias=False)
        self.tied_too.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.mix(x)
        return (self.tied(x) * self.tied_too(x)).float().square().mean()


def converted() -> tuple[Net, Any]:
    model = seeded(Net)
    return model, aotdist.to_float8(model, "delayed", float8_all_gather=True)


def sharded(**options: Any) -> Net:
    model, _ = converted()
    for block in model.blocks:
        fully_shard(block, mesh=line(dist.get_world_size()), **options)
    return fully_shard(model, mesh=line(dist.get_world_size()), **options)


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(4, 5, 32, generator=generator)


def inner(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors of a parameter, a gradient, a buffer."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return [local.weight, local.scale] if isinstance(local, Float8GatherWeight) else [local]


def different(a: nn.Module, b: nn.Module) -> list[str]:
    names = []
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert type(p.grad) is type(q.grad), name
        grads = ([], []) if p.grad is None else (inner(p.grad), inner(q.grad))
        pairs = zip(inner(p) + grads[0], inner(q) + grads[1], strict=True)
        names += [] if all(same_bits(x, y) for x, y in pairs) else [name]
    pairs = zip(a.named_buffers(), b.named_buffers(), strict=True)
    return names + [name for (name, x), (_, y) in pairs if not same_bits(x, y)]


def training_case(options: dict[str, Any]) -> None:
    eager, compiled = sharded(**options), aotdist.compile(sharded(**options), backend="fx")
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (eager, compiled)]
    for step in range(4):
        losses = [model(batch(step)) for model in (eager, compiled)]
        for loss in losses:
            loss.backward()
        assert same_bits(*losses)
        assert not (names := different(eager, compiled)), (step, names)
        for model, optimizer in zip((eager, compiled), optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    assert len(compiled.graphs) == 1
    sent = {
        str(node.all_input_nodes[0].meta["val"].dtype)
        for node in compiled.graphs[0]["forward"].graph.nodes
        if "all_gather_into_tensor" in str(node.target)
    }
    assert sent == {
        "torch.uint8",
        str(options.get("mp_policy", MixedPrecisionPolicy()).param_dtype or torch.float32),
    }
    assert "gathered in float8): blocks.0.up" in str(compiled.explain())


OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "kept after forward": {"reshard_after_forward": False},
}


@ranks
@pytest.mark.parametrize("which", OPTIONS)
def test_training(world2: World, which: str) -> None:
    world2.run(training_case, OPTIONS[which])


@pytest.mark.sweep
@ranks
def test_four_ranks(world4: World) -> None:
    world4.run(training_case, {})


@pytest.mark.sweep
@ranks
def test_shards_of_different_sizes() -> None:
    """80 rows on three ranks: 27, 27 and 26."""
    with fresh_world(3) as world:
        world.run(training_case, {})


def accumulation_case() -> None:
    """Without synchronisation in between, and a forward without a gradient."""
    eager, compiled = sharded(), aotdist.compile(sharded(), backend="fx")
    optimizers = [torch.optim.SGD(m.parameters(), 1e-1) for m in (eager, compiled)]
    for step in range(6):
        for model in (eager, compiled):
            model.set_requires_gradient_sync(step % 3 == 2)
        losses = [model(batch(step)) for model in (eager, compiled)]
        for loss in losses:
            loss.backward()
        assert same_bits(*losses)
        if step % 3 == 2:
            assert not (names := different(eager, compiled)), (step, names)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():  # leaves what is kept after forward gathered, in eager
            assert same_bits(*(model.eval()(batch(step)) for model in (eager, compiled)))
        for model in (eager, compiled):
            model.train()


@ranks
def test_accumulation(world2: World) -> None:
    world2.run(accumulation_case)


def exact_case(compiling: bool) -> None:
    """What the ranks gather is what one process casts; scales are whole weights', of one pass."""
    model = sharded()
    if compiling:
        aotdist.compile(model, backend="fx")
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)  # whose writes PyTorch does not count
    weights = [p for p in model.parameters() if isinstance(p._local_tensor, Float8GatherWeight)]
    reductions: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        reductions.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    try:
        for step in range(3):
            for _ in range(2):  # a second forward finds the scales of the first
                model(batch(step)).backward()
            assert reductions == [5] * (step + 1)  # blocks.{0,1}.{up,down} and mix
            optimizer.step()
    finally:
        dist.all_reduce = all_reduce
    model(batch(0))
    for weight in weights:
        local = weight._local_tensor
        whole = DTensor.from_local(local.weight, weight.device_mesh, weight.placements).full_tensor()
        assert same_bits(local.scale, scale_for(whole.abs().amax(), E4M3))
        (sent,), (scale,) = local.fsdp_pre_all_gather(
            weight.device_mesh, weight.shape, weight.stride(), nn.Identity(), None
        )
        assert sent.dtype == torch.uint8
        bytes_of_all = DTensor.from_local(sent, weight.device_mesh, weight.placements).full_tensor()
        assert same_bits(bytes_of_all.view(E4M3), quantise(whole, scale_for(amax_of(whole), E4M3), E4M3))


@ranks
@pytest.mark.parametrize("compiling", [False, True])
def test_scales_are_those_of_whole_weights(world2: World, compiling: bool) -> None:
    world2.run(exact_case, compiling)


def checkpoint_case(folder: str) -> None:
    """Checkpoints hold weights in high precision, plain ones, and training goes on from them.

    Amax histories are each rank's own, and one of them is kept: with the same data they are the same.
    """
    trained, resumed = (aotdist.compile(sharded(), backend="fx") for _ in range(2))
    optimizers = [torch.optim.AdamW(model.parameters(), 1e-2) for model in (trained, resumed)]
    trained(batch(0, rank=0)).backward()
    optimizers[0].step()
    optimizers[0].zero_grad()
    state = trained.state_dict()
    kinds = {type(v._local_tensor) if isinstance(v, DTensor) else type(v) for v in state.values()}
    assert kinds == {torch.Tensor} and {v.dtype for v in state.values()} == {torch.float32}
    parts = dict(zip(("model", "optim"), get_state_dict(trained, optimizers[0]), strict=True))
    dcp.save(parts, checkpoint_id=folder)
    wanted = dict(zip(("model", "optim"), get_state_dict(resumed, optimizers[1]), strict=True))
    dcp.load(wanted, checkpoint_id=folder)
    set_state_dict(resumed, optimizers[1], model_state_dict=wanted["model"], optim_state_dict=wanted["optim"])
    for step in range(1, 3):
        losses = [model(batch(step, rank=0)) for model in (trained, resumed)]
        for loss in losses:
            loss.backward()
        assert same_bits(*losses)
        assert not (names := different(trained, resumed)), (step, names)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks
def test_checkpoints(world2: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world2.run(checkpoint_case, folder)


def refusals_case() -> None:
    model, handle = converted()
    fully_shard(model, mesh=line(2))
    with pytest.raises(BadSettings, match="the weight of `blocks.0.up` is another now.*\n.*undo before"):
        handle.undo()
    with pytest.raises(BadSettings, match="`.root.` is sharded by FSDP2 already.*\n.*before `fully_shard`"):
        aotdist.to_float8(fully_shard(Block(), mesh=line(2)), "delayed", float8_all_gather=True)
    model, _ = converted()
    fully_shard(model.blocks[0], mesh=line(2), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    with pytest.raises(UnsupportedProgram, match="sharded on dimension 1\n.*`shard_placement_fn`"):
        model.blocks[0](batch(0))
    with pytest.raises(UnsupportedProgram, match="`up.weight` is a Float8GatherWeight.*another dimension"):
        aotdist.compile(model.blocks[0], backend="fx")


@ranks
def test_refusals(world2: World) -> None:
    world2.run(refusals_case)


def test_other_recipes_are_refused() -> None:
    with pytest.raises(BadSettings, match="`float8_all_gather` needs one scale"):
        aotdist.to_float8(Net(), "blockwise", float8_all_gather=True)


def test_before_it_is_sharded() -> None:
    """An ordinary model, that runs, is copied, moved and given back."""
    plain = seeded(Net)
    before = dict(plain.named_parameters())
    handle = aotdist.to_float8(plain, "delayed", float8_all_gather=True)
    by_class = {name: type(param.data) for name, param in plain.named_parameters()}
    assert by_class["mix.weight"] is Float8GatherWeight and by_class["tied.weight"] is torch.Tensor
    eager, compiled = copy.deepcopy(plain), aotdist.compile(copy.deepcopy(plain), backend="fx")
    torch.manual_seed(0)
    x = torch.randn(4, 5, 32)
    losses = [model(x) for model in (plain, eager, compiled)]
    for loss in losses:
        loss.backward()
    assert same_bits(losses[0], losses[1]) and same_bits(losses[0], losses[2])
    assert not different(plain, eager) and not different(plain, compiled)
    torch.optim.AdamW(plain.parameters(), 1e-2).step()
    handle.undo()
    assert all(param is before[name] for name, param in plain.named_parameters())
    assert not torch.equal(plain.mix.weight, eager.mix.weight.data.weight)


def test_operators_see_the_weight_itself() -> None:
    model, _ = converted()
    weight = model.mix.weight.detach()
    assert type(weight + 1) is torch.Tensor and torch.equal(weight + 1, weight.weight + 1)
    assert type(weight.split(16)[1]) is Float8GatherWeight and weight.split(16)[1].scale is weight.scale
    assert weight.mul_(2) is weight
    assert weight.to(torch.bfloat16).dtype == torch.bfloat16
    whole = Float8Tensor(quantise(weight.weight, weight.scale, E4M3), weight.scale, torch.float32)
    assert torch.allclose(whole.dequantise(), weight.weight, atol=weight.weight.abs().max())
    assert "scale=" in repr(weight)
