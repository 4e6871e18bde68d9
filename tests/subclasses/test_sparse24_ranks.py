"""2:4 layers under FSDP2 and tensor parallelism: compiled steps are eager's, bit for bit, on two ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import aotdist
from aotdist.errors import BadSettings, UnsupportedProgram
from aotdist.subclasses.protocol import plain_tensors
from aotdist.subclasses.sparse24 import Sparse24Tensor
from aotdist.subclasses.sparse24_selection import sparsify
from tests.ranks.harness import World
from tests.subclasses.fsdp_models import (
    Net,
    different_grads,
    eager_step,
    line,
    same_bits,
    seeded,
    shard_blocks,
    tokens,
)

pytestmark = pytest.mark.ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "chosen in each forward": {},
    "transposable, decay": {"mask": "transposable", "decay": 0.01},
    "held": {"select": "held", "gradient": "masked"},
    "inputs": {"operand": "input"},
    "packed": {"select": "packed"},
    "packed, transposable": {"select": "packed", "mask": "transposable"},
}


def converted(dim: int, which: str) -> tuple[Net, aotdist.Sparsified]:
    model = Net(dim)
    handle = aotdist.sparsify_24(model, lambda name, _: name.startswith("blocks."), **OPTIONS[which])
    assert handle.converted == ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")
    return model, handle


def fsdp(model: Net) -> Net:
    return shard_blocks(model, line(2))


def columns(param: nn.Parameter) -> Shard | None:
    """Four of a row's eight columns on each rank."""
    return Shard(1) if param.dim() == 2 and param.size(1) % 2 == 0 else None


def tensor_parallel(model: Net, mesh: DeviceMesh | None = None) -> Net:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh or line(2), plan)
    return model


def both(model: Net) -> Net:
    """Two ranks share a matrix, two pairs the parameters."""
    plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return shard_blocks(tensor_parallel(model, plane["tp"]), plane["dp"])


SPREADS: dict[str, Callable[[Net], Net]] = {
    "rows": fsdp,
    "columns": lambda model: shard_blocks(model, line(2), shard_placement_fn=columns),
    "bf16": lambda model: shard_blocks(model, line(2), mp_policy=BF16),
    "tensor parallel": tensor_parallel,
    "both": both,
}


SHARING = {"tensor parallel": 2, "both": 2}
"""Ranks that see the same batch, where it is not each its own."""


def training_case(which: str, spread: str, dim: int) -> None:
    """Three steps; what is held is chosen anew after each."""

    def make() -> Any:
        model, handle = converted(dim, which)
        return SPREADS[spread](model), handle

    (eager, eager_handle), (compiled, handle) = seeded(make), seeded(make)  # type: ignore[arg-type, misc]
    optimizers = [torch.optim.AdamW(model.parameters(), 0.05, foreach=False) for model in (eager, compiled)]
    aotdist.compile(compiled, backend="fx")
    for step in range(3):
        batch = tokens(step, rank=dist.get_rank() // SHARING.get(spread, 1))
        ours = compiled(batch)
        ours.backward()
        assert same_bits(eager_step(eager, batch), ours)
        assert not (names := different_gradients(eager, compiled)), (step, names)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if OPTIONS[which].get("select") == "held":
            eager_handle.choose()
            handle.choose()
    assert len(aotdist.explain(compiled).artifacts) == 1


def different_gradients(a: nn.Module, b: nn.Module) -> list[str]:
    """As `different_grads`, for models of which some parameters are no DTensors."""
    if all(isinstance(parameter, DTensor) for parameter in a.parameters()):
        return different_grads(a, b)
    pairs = zip(a.named_parameters(), b.parameters(), strict=True)
    local = [(name, *(None if g is None else _local(g) for g in (p.grad, q.grad))) for (name, p), q in pairs]
    return [
        name for name, g, h in local if (g is None) != (h is None) or (g is not None and not same_bits(g, h))
    ]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("which", OPTIONS)
def test_fsdp(world2: World, which: str) -> None:
    world2.run(training_case, which, "rows", 16)


@pytest.mark.parametrize(
    "which, spread, dim",
    [
        ("transposable, decay", "columns", 8),
        ("transposable, decay", "bf16", 16),
        ("packed, transposable", "bf16", 16),
    ],
)
def test_fsdp_otherwise(world2: World, which: str, spread: str, dim: int) -> None:
    """Whole dense weights are gathered before anything is chosen, so any dimension of them may be sharded."""
    world2.run(training_case, which, spread, dim)


@pytest.mark.parametrize("which", ["transposable, decay", "held"])
def test_fsdp_around_tensor_parallel(world4: World, which: str) -> None:
    world4.run(training_case, which, "both", 16)


@pytest.mark.parametrize("which", [which for which in OPTIONS if not which.startswith("packed")])
def test_tensor_parallel(world2: World, which: str) -> None:
    world2.run(training_case, which, "tensor parallel", 16)


def packed_case() -> None:
    """What travels is packed: 9/16 of the bytes that the same weights take dense in 16 bits."""
    moved = {}
    for which in ("packed", "chosen in each forward"):
        model = shard_blocks(converted(16, which)[0], line(2), mp_policy=BF16)
        model.blocks.requires_grad_(False)
        aotdist.compile(model, backend="fx")
        model(tokens()).backward()
        forward = next(g for g in aotdist.explain(model).artifacts[0].graphs if g.name == "forward")
        moved[which] = sum(c.num_bytes for c in forward.collectives if c.op == "all_gather_into_tensor")
    matrices = 2 * 2 * (32 * 16) * 2  # two in each of two blocks, whole, two bytes an element
    assert moved["chosen in each forward"] - moved["packed"] == matrices * 7 // 16


def test_packed_weights_are_gathered_packed(world2: World) -> None:
    world2.run(packed_case)


def checkpoint_case(folder: str) -> None:
    """Packed shards are saved, and loaded into another model, packed."""
    model, other = (fsdp(converted(16, "packed, transposable")[0]) for _ in range(2))
    checkpoint.save(model.state_dict(), checkpoint_id=folder)
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    for name, ours in model.state_dict().items():
        one, two = _local(ours), _local(state[name])
        assert type(one) is type(two)
        parts = zip(plain_tensors(one), plain_tensors(two), strict=True)
        assert all(torch.equal(a, b) for a, b in parts), name
    with torch.no_grad():
        assert same_bits(model(tokens()), other(tokens()))


def undo_case() -> None:
    """With the root alone sharded, layers keep their class; packed ones have no dense shard to go back to."""
    for which, refused in (("chosen in each forward", False), ("packed", True)):
        model, handle = converted(16, which)
        fully_shard(model, mesh=line(2))
        with pytest.raises(BadSettings, match="is another now") if refused else contextlib.nullcontext():
            handle.undo()
        assert (type(model.blocks[0].up) is nn.Linear) == (not refused)


def test_undo_of_what_was_sharded(world2: World) -> None:
    world2.run(undo_case)


def test_packed_shards_in_a_checkpoint(world2: World, tmp_path: Path) -> None:
    world2.run(checkpoint_case, str(tmp_path))


def cut_case() -> None:
    """A shard boundary through a group, or rows that do not divide."""
    packed = {"select": "packed", "mask": "transposable"}
    for rows, options, says in (
        (24, packed, "from 0 to 12 goes through groups of four"),
        (7, {"select": "packed"}, "7 packed rows do not divide among 2 ranks"),
    ):
        model = nn.Sequential(nn.Linear(16, rows), nn.Linear(rows, 8))
        aotdist.sparsify_24(model, lambda name, _: name == "0", **options)
        with pytest.raises(UnsupportedProgram, match=says):
            fully_shard(model, mesh=line(2))(torch.randn(2, 16))


def test_shards_that_cut_packed_groups_are_refused(world2: World) -> None:
    world2.run(cut_case)


def shards_case() -> None:
    """Each rank packs what it would hold of the whole matrix, packed."""
    torch.manual_seed(0)
    dense = torch.randn(32, 48)
    for mask in ("row", "transposable"):
        whole = sparsify(dense, mask)
        for placement in (Shard(0), Shard(1), Replicate()):
            sharded = sparsify(distribute_tensor(dense, line(2), [placement]), mask)
            local = sharded.to_local()
            assert isinstance(local, Sparse24Tensor)
            assert sharded.shape == whole.shape
            expected = distribute_tensor(whole.to_dense(), line(2), [placement]).to_local()
            assert torch.equal(local.to_dense(), expected)


def test_shards_are_parts_of_the_whole(world2: World) -> None:
    world2.run(shards_case)


def refusals_case() -> None:
    mesh = line(2)
    for dense, placement, mask, says in (
        (torch.zeros(8, 8), Shard(1), "row", "dimension 1, of 8, is sharded 2 ways"),
        (torch.zeros(8, 24), Shard(1), "row", "multiple of 16"),
        (torch.zeros(8, 16), Shard(0), "transposable", "dimension 0, of 8, is sharded 2 ways"),
        (torch.zeros(7, 12), Shard(0), "row", "rows of 12"),
    ):
        with pytest.raises(UnsupportedProgram, match=says):
            sparsify(distribute_tensor(dense, mesh, [placement]), mask)
    assert sparsify(distribute_tensor(torch.zeros(7, 8), mesh, [Shard(0)])).shape == (7, 8)
    partial = DTensor.from_local(torch.zeros(8, 8), mesh, [Partial()])
    with pytest.raises(UnsupportedProgram, match="partial sum"):
        sparsify(partial)


def test_shards_that_cut_groups_are_refused(world2: World) -> None:
    world2.run(refusals_case)


def refused_layer_case() -> None:
    """Two ranks have four of the eight columns each: half a byte of metadata."""
    models = [converted(8, "chosen in each forward")[0] for _ in range(2)]
    for model in models:
        parallelize_module(model.blocks[0], line(2), {"up": RowwiseParallel(input_layouts=Replicate())})
    aotdist.compile(models[1], backend="fx")
    for each in models:
        with pytest.raises(UnsupportedProgram, match="cuts groups of four"):
            each(tokens(0, rank=0))


def test_layers_that_cut_groups_are_refused(world2: World) -> None:
    world2.run(refused_layer_case)
