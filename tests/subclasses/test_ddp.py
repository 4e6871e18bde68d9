"""DDP: gradients reduced in the graph where the reducer would do no more, and by the reducer elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import aotdist
from aotdist.errors import UnsupportedProgram
from tests.ranks.harness import World
from tests.subclasses.fsdp_models import same_bits, seeded

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    """A tied head, a batch norm whose statistics DDP broadcasts, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.mix = nn.Linear(7, 7, bias=False)
        self.tied = nn.Linear(7, 7, bias=False)
        self.tied.weight = self.mix.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.mix.weight, nn.Parameter)
        x = self.norm(self.embed(x)).relu()
        return self.tied(self.frozen(self.mix(x)).tanh()).square().mean()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(6, 5, generator=generator)


def pair(**options: Any) -> tuple[nn.Module, nn.Module]:
    eager, compiled = (DistributedDataParallel(seeded(Net), **options) for _ in range(2))
    assert aotdist.compile(compiled, backend="fx") is compiled
    return eager, compiled


def in_graph(ddp: nn.Module) -> list[bool]:
    """Of each artifact: whether it reduces."""
    return [any("all_reduce" in graph.code for graph in graphs.values()) for graphs in ddp.graphs]


def different_grads(eager: nn.Module, compiled: nn.Module) -> list[str]:
    pairs = zip(eager.named_parameters(), compiled.named_parameters(), strict=True)
    return [
        name
        for (name, p), (_, q) in pairs
        if (p.grad is None) != (q.grad is None) or (p.grad is not None and not same_bits(p.grad, q.grad))
    ]


def compare(eager: nn.Module, compiled: nn.Module, step: int) -> None:
    losses = [model(batch(step)) for model in (eager, compiled)]
    for loss in losses:
        loss.backward()
    assert same_bits(*losses)
    assert not (names := different_grads(eager, compiled)), (step, names)
    for a, b in zip(eager.buffers(), compiled.buffers(), strict=True):
        assert same_bits(a, b)


def training_case(options: dict[str, Any], reduces: list[bool]) -> None:
    eager, compiled = pair(**options)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (eager, compiled)]
    for step in range(4):
        compare(eager, compiled, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert in_graph(compiled) == reduces
    assert compiled.require_backward_grad_sync and compiled.require_forward_param_sync


OPTIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "as it comes": ({}, True),
    "small buckets": ({"bucket_cap_mb": 0.0001}, True),
    "buffers left alone": ({"broadcast_buffers": False}, True),
    "unused parameters": ({"find_unused_parameters": True}, False),
    "gradients as views": ({"gradient_as_bucket_view": True}, False),
    "static graph": ({"static_graph": True}, False),
}


@pytest.mark.parametrize("which", OPTIONS)
def test_training(world2: World, which: str) -> None:
    options, reduces = OPTIONS[which]
    world2.run(training_case, options, [reduces])


def accumulation_case() -> None:
    """Gradients that are there already are reduced with the new ones, by the reducer."""
    eager, compiled = pair()
    for step in range(6):
        with contextlib.ExitStack() as stack:
            if step % 3 != 2:
                for model in (eager, compiled):
                    stack.enter_context(model.no_sync())
            compare(eager, compiled, step)
        if step % 3 == 2:
            for model in (eager, compiled):
                model.zero_grad()
    assert in_graph(compiled) == [False]
    for step in range(2):  # and once more without `zero_grad` in between
        compare(eager, compiled, step)
    assert sorted(in_graph(compiled)) == [False, True]


def test_accumulation(world2: World) -> None:
    world2.run(accumulation_case)


def cleared_late_case() -> None:
    """`zero_grad` between forward and backward."""
    eager, compiled = pair()
    for step in range(3):
        losses = [model(batch(step)) for model in (eager, compiled)]
        for model, loss in zip((eager, compiled), losses, strict=True):
            model.zero_grad()
            loss.backward()
        assert not (names := different_grads(eager, compiled)), (step, names)


def test_gradients_cleared_after_forward(world2: World) -> None:
    world2.run(cleared_late_case)


def hooked_case(register: Callable[[nn.Module, list[float]], None]) -> None:
    eager, compiled = pair()
    seen: list[list[float]] = [[], []]
    for model, log in zip((eager, compiled), seen, strict=True):
        register(model, log)
    compare(eager, compiled, 0)
    assert in_graph(compiled) == [False] and seen[0] == seen[1]


def comm_hook(model: nn.Module, log: list[float]) -> None:
    def hook(group, bucket):  # DDP wants its own types or none
        log.append(float(bucket.buffer().numel()))
        return allreduce_hook(group, bucket)

    model.register_comm_hook(None, hook)


def tensor_hook(model: nn.Module, log: list[float]) -> None:
    model.module.mix.weight.register_hook(lambda grad: log.append(float(grad.sum())))


@pytest.mark.parametrize("register", [comm_hook, tensor_hook])
def test_hooks_keep_the_reducer(world2: World, register: Callable[..., None]) -> None:
    world2.run(hooked_case, register)


def surroundings_case() -> None:
    """Evaluation, eager calls and what compiling shows."""
    eager, compiled = pair()
    compare(eager, compiled, 0)
    assert "all_reduce" in str(compiled.explain()) and "all_reduce" in compiled.graphs[0]["backward"].code
    for model in (eager, compiled):
        model.zero_grad()
    with aotdist.disable():
        compare(eager, compiled, 1)
    with torch.no_grad():
        assert same_bits(eager(batch(2)), compiled(batch(2)))
    with pytest.raises(UnsupportedProgram, match="DistributedDataParallel"):
        aotdist.compile(lambda x: eager(x), backend="fx")(batch(0))
    assert "forward" not in vars(eager)


def test_around_training(world2: World) -> None:
    world2.run(surroundings_case)


class Redirected(nn.Module):
    """Calls a method of a model by the forward of DDP around it, as Lightning's Fabric does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.ddp = model, DistributedDataParallel(model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def loss_instead(x: torch.Tensor) -> torch.Tensor:
            del self.model.forward
            return self.model(x).square().mean()

        self.model.forward = loss_instead
        return self.ddp(x)


def redirected_case() -> None:
    """What is compiled reaches the DDP module that it is called by."""
    models = [seeded(lambda: nn.Linear(5, 3)) for _ in range(2)]
    aotdist.compile(models[1], backend="fx")
    eager, compiled = (Redirected(model) for model in models)
    for step in range(2):
        losses = [model(batch(step)) for model in (eager, compiled)]
        for loss in losses:
            loss.backward()
        assert same_bits(*losses) and not different_grads(eager, compiled)


def test_called_through_ddp(world2: World) -> None:
    world2.run(redirected_case)


def transformed_case() -> None:
    """Under a `torch.func` transform all of it runs eagerly, so the reducer has to reduce."""
    models = [DistributedDataParallel(seeded(lambda: nn.Linear(5, 3))) for _ in range(2)]
    eager, compiled = models[0], aotdist.compile(models[1], backend="fx")
    for model in (eager, compiled):
        torch.func.vmap(model)(batch(0)).square().sum().backward()
    assert not different_grads(eager, compiled)


def test_under_a_transform(world2: World) -> None:
    world2.run(transformed_case)


def taken_back_case() -> None:
    """Compiled and taken back, a model trains as one that never was compiled, with the reducer."""
    eager, compiled = pair()
    compare(eager, compiled, 0)
    aotdist.compile(compiled, backend="eager")
    left = {name for part in (compiled, compiled.module) for name in vars(part)}
    assert not left & {"source", "graphs", "explain", "_compiled_call_impl"}
    compare(eager, compiled, 1)


def test_taken_back(world2: World) -> None:
    world2.run(taken_back_case)
