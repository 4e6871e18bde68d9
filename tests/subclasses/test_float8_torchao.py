"""Models that were converted by torchao itself, or split by its styles: compiled as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import aotdist
from aotdist.errors import UnsupportedProgram
from aotdist.subclasses.protocol import plain_tensors
from tests.ranks.harness import World
from tests.subclasses.float8_models import different, needs_torchao
from tests.subclasses.fsdp_models import line, same_bits, seeded
from tests.subclasses.test_float8_meshes import PLANS, Feedforward, step_of

pytestmark = [pytest.mark.ranks, needs_torchao]


def by_torchao(model: nn.Module, **options: Any) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True, **options)
    return convert_to_float8_training(model, config=config)


def gathers_in_8_bits() -> Any:
    model = by_torchao(seeded(Feedforward), enable_fsdp_float8_all_gather=True)
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=line(2))
    return fully_shard(model, mesh=line(2))


def split_by_its_styles() -> nn.Module:
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    plan: dict[str, Any] = {"up": Float8ColwiseParallel(), "down": Float8RowwiseParallel()}
    return parallelize_module(by_torchao(seeded(Feedforward)), line(2), plan)


def split(which: str) -> nn.Module:
    return parallelize_module(by_torchao(seeded(Feedforward)), line(2), PLANS[which])


MODELS: dict[str, Callable[[], Any]] = {
    "FSDP2 gathers in 8 bits": gathers_in_8_bits,
    "its parallel styles": split_by_its_styles,
    **{f"PyTorch's styles, {which}": (lambda which=which: split(which)) for which in PLANS},
}


def training_case(name: str, scales_beforehand: bool) -> None:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    eager, compiled = (MODELS[name]() for _ in range(2))
    aotdist.compile(compiled, backend="fx")
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (eager, compiled)]
    for step in range(3):
        assert same_bits(*(step_of(model, step) for model in (eager, compiled)))
        assert not (names := different(eager, compiled)), (step, names)
        for model, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            if scales_beforehand:
                precompute_float8_dynamic_scale_for_fsdp(model)


@pytest.mark.parametrize("name", MODELS)
def test_training(world2: World, name: str) -> None:
    world2.run(training_case, name, False)


def test_scales_computed_beforehand(world2: World) -> None:
    world2.run(training_case, "FSDP2 gathers in 8 bits", True)


def step_case() -> None:
    """In a whole step; a step that computes the scales by itself is refused, and changes nothing."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    eager, compiled = (gathers_in_8_bits() for _ in range(2))

    def step_that_trains(model: Any, *, scales: bool) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def step(x: torch.Tensor) -> None:
            model(x).square().mean().backward()
            optimizer.step()
            if scales:
                precompute_float8_dynamic_scale_for_fsdp(model)
            optimizer.zero_grad()

        return step

    def batch(at: int) -> torch.Tensor:
        return torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * at + dist.get_rank()))

    def parts() -> list[torch.Tensor]:
        return [part for param in compiled.parameters() for part in plain_tensors(param)]

    steps = step_that_trains(eager, scales=False), step_that_trains(compiled, scales=False)
    ours = aotdist.compile(steps[1], backend="fx")
    for at in range(4):
        for model, step in ((eager, steps[0]), (compiled, ours)):
            step(batch(at))
            precompute_float8_dynamic_scale_for_fsdp(model)
        assert not (names := different(eager, compiled)), (at, names)
    assert len(ours.graphs) == 1
    by_itself = aotdist.compile(step_that_trains(compiled, scales=True), backend="fx")
    by_itself(batch(0))  # as it is written
    before = [part.clone() for part in parts()]
    with pytest.raises(UnsupportedProgram, match="what is inside of a WeightWithDynamicFloat8CastTensor"):
        by_itself(batch(0))
    assert all(map(torch.equal, before, parts()))


def test_scales_computed_between_steps(world2: World) -> None:
    world2.run(step_case)
