"""What cannot be captured is refused by name, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.fsdp import MODULE_RULE
from tests.ranks.harness import World
from tests.subclasses.fsdp_models import Net, captured, line, seeded, shard_blocks, tokens

pytestmark = pytest.mark.ranks


class Gathering(torch.Tensor):
    """A tensor with all-gather hooks of its own, as FP8 weights have, that cannot be taken apart."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any: ...
    def fsdp_post_all_gather(self, *args: Any) -> Any: ...


class GatheringPair(TwoTensor):
    """One that can be, whose hook asks for more than FSDP2 gives."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any) -> Any: ...
    def fsdp_post_all_gather(self, *args: Any) -> Any: ...


def wrap_a_weight(model: Net) -> None:
    weight = model.blocks[1].up.weight
    weight._local_tensor = weight._local_tensor.as_subclass(Gathering)


def pair_a_weight(model: Net) -> None:
    weight = model.blocks[1].up.weight
    weight._local_tensor = GatheringPair(weight._local_tensor, weight._local_tensor)


SWITCHES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "gathering subclass": (
        r"`blocks\.1\.up\.weight` is a Gathering, which gathers itself .* cannot be taken apart",
        wrap_a_weight,
    ),
    "arguments of the gathering": (
        r"`blocks\.1\.up\.weight` is a GatheringPair, whose `fsdp_pre_all_gather` takes other arguments",
        pair_a_weight,
    ),
    "all-reduce hook": (
        r"`blocks\.0` has an all-reduce hook",
        lambda model: model.blocks[0].set_all_reduce_hook(lambda grad: None),
    ),
    "custom all-gather": (
        r"`blocks\.0` has a custom all-gather",
        lambda model: model.blocks[0].set_custom_all_gather(object()),
    ),
}
REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")  # not in torch 2.11
if REDUCES_UNUSED:
    SWITCHES["unused parameters"] = (
        r"`\(root\)` reduces parameters that no gradient reached",
        lambda model: model.set_reduce_scatter_unused_params(True, recurse=False),
    )


def switch_case(which: str) -> None:
    message, switch = SWITCHES[which]
    model = seeded(lambda: shard_blocks(Net(), line(2)))
    model(tokens()).backward()
    before = hooks_of(model)
    switch(model)
    with pytest.raises(UnsupportedProgram, match=message) as raised:
        MODULE_RULE.check(model)
    assert raised.value.stage == "capture" and raised.value.fix
    assert hooks_of(model) == before


@pytest.mark.parametrize("which", SWITCHES)
def test_switches(world2: World, which: str) -> None:
    world2.run(switch_case, which)


def late_switch_case() -> None:
    """A switch thrown after compilation is noticed at the next call."""
    model = seeded(lambda: shard_blocks(Net(), line(2)))
    MODULE_RULE.check(model)
    model.set_reduce_scatter_unused_params(True)
    with pytest.raises(UnsupportedProgram, match="set_reduce_scatter_unused_params"):
        MODULE_RULE.prepare(model)


@pytest.mark.skipif(not REDUCES_UNUSED, reason="this torch has no such switch")
def test_a_switch_thrown_later(world2: World) -> None:
    world2.run(late_switch_case)


def offload_case() -> None:
    model = seeded(lambda: shard_blocks(Net(), line(2), offload_policy=CPUOffloadPolicy(pin_memory=False)))
    with pytest.raises(UnsupportedProgram, match=r"uses `CPUOffloadPolicy`, which cannot be compiled"):
        MODULE_RULE.check(model)


def test_cpu_offload(world2: World) -> None:
    world2.run(offload_case)


def first_fsdp_case() -> None:
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu")), nn.ReLU())
    with pytest.raises(UnsupportedProgram, match=r"`0` is sharded by FSDP1"):
        aotdist.compile(model, backend="fx")(torch.ones(2, 4))
    with pytest.raises(UnsupportedProgram, match=r"is sharded by FSDP1"):
        aotdist.compile(lambda x: model(x).sum(), backend="fx")(torch.ones(2, 4))


def test_the_first_fsdp(world2: World) -> None:
    world2.run(first_fsdp_case)


def smaller_mesh_case() -> None:
    model = seeded(lambda: shard_blocks(Net(), line(4), reshard_after_forward=2))
    with pytest.raises(UnsupportedProgram, match=r"`\(root\)` reshards to a smaller mesh after forward"):
        MODULE_RULE.check(model)
    MODULE_RULE.check(seeded(lambda: shard_blocks(Net(), line(4), reshard_after_forward=4)))


def test_resharding_to_a_smaller_mesh(world4: World) -> None:
    world4.run(smaller_mesh_case)


def partial_reduction_case() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = seeded(lambda: shard_blocks(Net(), mesh))
    model.set_requires_all_reduce(False)
    MODULE_RULE.check(model)
    model(tokens()).backward()
    model.set_requires_all_reduce(True)
    with pytest.raises(UnsupportedProgram, match=r"`\(root\)` holds gradients of some of its parameters"):
        MODULE_RULE.prepare(model)


def test_partial_reduction(world2: World) -> None:
    world2.run(partial_reduction_case)


class Pair(nn.Module):
    """Two modules sharded as one, and no FSDP root around them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def rootless_case() -> None:
    model = Pair()
    fully_shard([model.a, model.b], mesh=line(2))
    with pytest.raises(
        UnsupportedProgram, match="`a` is sharded together with others, outside of any FSDP root"
    ):
        MODULE_RULE.check(model)


def test_a_group_without_a_root(world2: World) -> None:
    world2.run(rootless_case)


def part_of_eager_case() -> None:
    """A block compiled inside an eager FSDP model: fine, but not while the model accumulates."""
    model = seeded(lambda: shard_blocks(Net(), line(2)))
    model(tokens()).backward()
    block = model.blocks[0]
    MODULE_RULE.prepare(block)
    model.set_requires_gradient_sync(False)
    with pytest.raises(UnsupportedProgram, match="accumulates gradients inside an uncompiled FSDP model"):
        MODULE_RULE.prepare(block)


def test_a_part_of_an_eager_model(world2: World) -> None:
    world2.run(part_of_eager_case)


def hooks_of(model: nn.Module) -> list[list[tuple[int, Any]]]:
    """Every forward hook of every module, in order."""
    return [
        list(hooks.items())
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
    ]


def registered(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(param)) for name, param in model.named_parameters(remove_duplicate=False)]


def restored_case(fails: bool) -> None:
    """The hooks come back in their order, the user's never left; the parameters too, also after an error."""
    model = seeded(lambda: shard_blocks(Net(), line(2), reshard_after_forward=False))
    order: list[str] = []
    block = model.blocks[1]
    block.register_forward_pre_hook(lambda module, args: order.append(type(module.up.weight).__name__))
    block.register_forward_pre_hook(lambda *_: order.append(type(block.up.weight).__name__), prepend=True)
    block.register_forward_hook(lambda *_: order.append("after"))
    if fails:
        block.register_forward_hook(_fail)
    MODULE_RULE.prepare(model)
    before, params = hooks_of(model), registered(model)
    try:
        with captured(model):
            model(tokens()).backward()
    except ZeroDivisionError:
        assert fails
    assert order == ["DTensor", "Tensor", "after"]
    assert hooks_of(model) == before
    assert registered(model) == params
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert all("_pre_forward" not in vars(module._get_fsdp_state()) for module in [model, *model.blocks])


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_are_restored(world2: World, fails: bool) -> None:
    world2.run(restored_case, fails)


def claims_case() -> None:
    assert not MODULE_RULE.claims(Net())
    assert MODULE_RULE.claims(shard_blocks(Net(), line(dist.get_world_size())))


def test_claims(world2: World) -> None:
    world2.run(claims_case)
