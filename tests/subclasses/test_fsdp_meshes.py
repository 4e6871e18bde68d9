"""Meshes of four ranks: HSDP, FSDP inside tensor parallelism, one shard, and ways to divide."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from aotdist.api import compile as compile_step
from tests.ranks.harness import World
from tests.subclasses.fsdp_models import (
    Net,
    captured_step,
    compare,
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

BF16 = {"param_dtype": torch.bfloat16}
POLICIES = {"fp32": {}, "bf16": BF16, "bf16 reduced in fp32": {**BF16, "reduce_dtype": torch.float32}}


def plane(replicas: int, shards: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def hsdp_case(shape: tuple[int, int], policy: dict[str, Any], factor: float | None = None) -> None:
    def make() -> Net:
        model = shard_blocks(Net(), plane(*shape), mp_policy=MixedPrecisionPolicy(**policy))
        for module in fsdp_modules(model) if factor else ():
            module.set_gradient_divide_factor(factor)
        return model

    compare(make)


@pytest.mark.parametrize(
    "policy", [*POLICIES.values(), {"param_dtype": torch.float16}], ids=[*POLICIES, "fp16"]
)
def test_hsdp(world4: World, policy: dict[str, Any]) -> None:
    world4.run(hsdp_case, (2, 2), policy)


@pytest.mark.parametrize("factor", [None, 1.0])
def test_one_shard_and_replicas(world2: World, factor: float | None) -> None:
    world2.run(hsdp_case, (2, 1), {}, factor)


class Integers(Net):
    """Small integers everywhere: sums are exact in whatever order the collective adds."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-1, 2, param.shape))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens)).float().sum()


def four_shards_case() -> None:
    compare(lambda: shard_blocks(Integers(), line(4)))
    eager, compiled = (seeded(lambda: shard_blocks(Net(), line(4))) for _ in range(2))
    eager_step(eager, tokens()), captured_step(compiled, tokens())
    for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)


def test_four_shards(world4: World) -> None:
    """With more than two ranks gloo adds in an order that depends on the place in the buffer."""
    world4.run(four_shards_case)


DIVISIONS: dict[str, Callable[[Any], None]] = {
    "by the number of shards": lambda module: module.set_gradient_divide_factor(2.0),
    "after a sum": lambda module: module.set_force_sum_reduction_for_comms(True),
    "after a sum, by three": lambda module: (
        module.set_force_sum_reduction_for_comms(True),
        module.set_gradient_divide_factor(3.0),
    ),
}


def division_case(which: str, policy: dict[str, Any]) -> None:
    def make() -> Net:
        model = shard_blocks(Net(), line(2), mp_policy=MixedPrecisionPolicy(**policy))
        for module in fsdp_modules(model):
            DIVISIONS[which](module)
        return model

    compare(make)


@pytest.mark.parametrize("policy", [{}, {"param_dtype": torch.float16}], ids=["fp32", "fp16"])
@pytest.mark.parametrize("which", DIVISIONS)
def test_divide_factor(world2: World, which: str, policy: dict[str, Any]) -> None:
    world2.run(division_case, which, policy)


def any_factor_case() -> None:
    """Gloo cannot multiply before it sums, so eager raises there; the sum is known all the same."""
    ours, plain = (seeded(lambda: shard_blocks(Net(), line(2))) for _ in range(2))
    for module in fsdp_modules(ours):
        module.set_gradient_divide_factor(3.0)
    captured_step(ours, tokens())
    captured_step(plain, tokens())
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        if p.grad is not None:
            torch.testing.assert_close(p.grad._local_tensor * 3, q.grad._local_tensor * 2)


def test_any_divide_factor(world2: World) -> None:
    world2.run(any_factor_case)


class Feedforward(nn.Module):
    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Parallel(nn.Module):
    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, dim)
        self.blocks = nn.ModuleList(Feedforward(dim) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return (x * x).sum(-1).mean()


def tensor_parallel(policy: dict[str, Any], sequence: bool) -> Parallel:
    """Columns and rows of each block over one axis, FSDP over the other; the sequence too, if asked."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Parallel()
    split = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "up": ColwiseParallel(input_layouts=split),
        "down": RowwiseParallel(output_layouts=split),
    }
    if sequence:
        plan["norm"] = SequenceParallel()
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    if sequence:
        parallelize_module(
            model,
            mesh["tensor"],
            {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))},
        )
    mp_policy = MixedPrecisionPolicy(**policy)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"], mp_policy=mp_policy)
    return fully_shard(model, mesh=mesh["data"], mp_policy=mp_policy)


def shared_tokens(step: int = 0) -> torch.Tensor:
    """The ranks of one tensor-parallel group see the same tokens; an even sequence."""
    rank = dist.get_rank() // 2
    return torch.cat([tokens(step, rank), tokens(step + 50, rank)], 1)


def tensor_parallel_case(policy: dict[str, Any], sequence: bool) -> None:
    eager, compiled = (seeded(lambda: tensor_parallel(policy, sequence)) for _ in range(2))
    for step in range(2):
        batch = shared_tokens(step)
        assert same_bits(eager_step(eager, batch), captured_step(compiled, batch))
        assert not (names := different_grads(eager, compiled)), names


@pytest.mark.parametrize("policy", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sequence", [False, True])
def test_inside_tensor_parallelism(world4: World, policy: dict[str, Any], sequence: bool) -> None:
    world4.run(tensor_parallel_case, policy, sequence)


def tensor_parallel_accumulation_case(sequence: bool) -> None:
    eager, compiled = (seeded(lambda: tensor_parallel({}, sequence)) for _ in range(2))
    for model, step in ((eager, eager_step), (compiled, captured_step)):
        for number, sync in enumerate([False, False, True]):
            model.set_requires_gradient_sync(sync)
            step(model, shared_tokens(number))
    if not sequence:
        assert not (names := different_grads(eager, compiled)), names
    for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("sequence", [False, True])
def test_accumulation_inside_tensor_parallelism(world4: World, sequence: bool) -> None:
    """A norm's partial gradients are summed over the sequence at every step, by eager only at the last."""
    world4.run(tensor_parallel_accumulation_case, sequence)


MESHES = {
    "shards": {"shard": 2},
    "replicas": {"replicate": 2, "shard": 1},
    "one shard, tensor parallel": {"shard": 1, "tensor": 2},
    "hsdp": {"replicate": 2, "shard": 2},
    "shards, tensor parallel": {"shard": 2, "tensor": 2},
    "replicas, tensor parallel": {"replicate": 2, "shard": 1, "tensor": 2},
    "two axes of shards, tensor parallel": {"shard": 2, "context": 1, "tensor": 2},
}
takes_whole_mesh = pytest.mark.skipif(
    "dp_mesh_dims" not in inspect.signature(fully_shard).parameters,
    reason="`fully_shard` of this torch takes no `dp_mesh_dims`",
)


@functools.cache
def named_mesh(which: str) -> DeviceMesh:
    """One object for each, as DTensor's caches hand out the first of those that are equal."""
    axes = MESHES[which]
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def placed(tensor: torch.Tensor, which: str, /, **axes: Shard) -> torch.Tensor:
    """The tensor on a whole mesh: sharded on these axes, replicated on the others."""
    placements = [axes.get(name, Replicate()) for name in MESHES[which]]
    return distribute_tensor(tensor, named_mesh(which), placements)


def on_whole_mesh(which: str, policy: dict[str, Any], reshard: bool = True) -> Parallel:
    """Every parameter on the whole mesh before `fully_shard`, which is told the axes of the data."""
    from torch.distributed.fsdp import DataParallelMeshDims

    model = Parallel()
    cut = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    for path, param in list(model.named_parameters()):
        owner, name = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
        own = {"tensor": cut[end]} if (end := ".".join(path.split(".")[-2:])) in cut else {}
        setattr(owner, name, nn.Parameter(placed(param.detach(), which, **own)))
    shard = ("shard", "context") if "context" in MESHES[which] else "shard"
    options: dict[str, Any] = {
        "mesh": named_mesh(which),
        "dp_mesh_dims": DataParallelMeshDims(shard, "replicate" if "replicate" in MESHES[which] else None),
        "mp_policy": MixedPrecisionPolicy(**policy),
        "reshard_after_forward": reshard,
    }
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def placed_tokens(which: str, step: int = 0) -> torch.Tensor:
    batch = torch.cat([tokens(step, rank) for rank in range(4)])
    return placed(batch, which, replicate=Shard(0), shard=Shard(0))


def whole_mesh_case(which: str, policy: dict[str, Any], reshard: bool) -> None:
    eager, compiled = (seeded(lambda: on_whole_mesh(which, policy, reshard)) for _ in range(2))
    for step in range(2):
        batch = placed_tokens(which, step)
        losses = eager_step(eager, batch), captured_step(compiled, batch)
        assert same_bits(*(loss.to_local() for loss in losses))
        assert not (names := different_grads(eager, compiled)), names


@takes_whole_mesh
@pytest.mark.parametrize(
    ("policy", "reshard"), [({}, True), (BF16, False)], ids=["fp32", "bf16, whole in between"]
)
@pytest.mark.parametrize("which", MESHES)
def test_parameters_on_a_whole_mesh(
    world2: World, world4: World, which: str, policy: dict[str, Any], reshard: bool
) -> None:
    """`dp_mesh_dims`: FSDP2 takes parameters that are DTensors on all axes, and reduces over some."""
    world = world2 if math.prod(MESHES[which].values()) == 2 else world4
    world.run(whole_mesh_case, which, policy, reshard)


def whole_mesh_accumulation_case(which: str, kinds: str, policy: dict[str, Any]) -> None:
    eager, mixed = (seeded(lambda: on_whole_mesh(which, policy)) for _ in range(2))
    for model, ways in ((eager, "eee"), (mixed, kinds)):
        for step, way in enumerate(ways):
            model.set_requires_gradient_sync(step == 2)
            (captured_step if way == "c" else eager_step)(model, placed_tokens(which, step))
    assert not (names := different_grads(eager, mixed)), names


@takes_whole_mesh
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("kinds", ["ccc", "cec"])
@pytest.mark.parametrize("which", ["shards", "replicas"])
def test_accumulation_on_a_whole_mesh(world2: World, which: str, kinds: str, policy: dict[str, Any]) -> None:
    """Gradients stay sums that the data's axes have yet to take, until the last step reduces them."""
    world2.run(whole_mesh_accumulation_case, which, kinds, policy)


def whole_mesh_step_case(which: str) -> None:
    def trained(compile_it: bool) -> tuple[list[torch.Tensor], nn.Module]:
        model = seeded(lambda: on_whole_mesh(which, {}))
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)

        def step(batches: list[torch.Tensor]) -> torch.Tensor:
            for at, batch in enumerate(batches):
                model.set_requires_gradient_sync(at == len(batches) - 1)
                model(batch).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return norm

        run = compile_step(step, backend="fx") if compile_it else step
        norms = [run([placed_tokens(which, 3 * k + micro) for micro in range(3)]) for k in range(3)]
        return norms, model

    (theirs, eager), (ours, compiled) = trained(False), trained(True)
    assert all(same_bits(a.to_local(), b.to_local()) for a, b in zip(theirs, ours, strict=True))
    for p, q in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert same_bits(p._local_tensor, q._local_tensor) and p._spec == q._spec


@takes_whole_mesh
@pytest.mark.filterwarnings("ignore:.*sequential all_reduce")
@pytest.mark.parametrize("which", ["shards", "one shard, tensor parallel"])
def test_a_whole_step_on_a_whole_mesh(world2: World, which: str) -> None:
    """Its backwards reduce at the last; the trace that takes blocks for equal is dropped half way."""
    world2.run(whole_mesh_step_case, which)


def annotated_case(accumulate: bool) -> None:
    import spmd_types as spmd

    mesh = named_mesh("shards")
    axis = spmd.MeshAxis.of(mesh.get_group("shard"))

    def make() -> Net:
        from torch.distributed.fsdp import DataParallelMeshDims

        model = Net()
        for param in model.parameters():
            spmd.assert_type(param, {axis: spmd.R})
        return shard_blocks(model, mesh, dp_mesh_dims=DataParallelMeshDims("shard"))

    eager, compiled = seeded(make), seeded(make)
    for step in range(2):
        for model, run in ((eager, eager_step), (compiled, captured_step)):
            model.set_requires_gradient_sync(step == 1 or not accumulate)
            run(model, tokens(step))
    assert not (names := different_grads(eager, compiled)), names


@takes_whole_mesh
@pytest.mark.skipif(
    not getattr(dist, "_is_spmd_types_available", bool)(),
    reason="needs torch 2.14 with the package `spmd_types`",
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_parameters_that_spmd_types_annotates(world2: World, accumulate: bool) -> None:
    """They are plain tensors in the module, and DTensors on the whole mesh to the optimizer."""
    world2.run(annotated_case, accumulate)
