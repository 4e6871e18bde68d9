"""Small sharded models that between them have every case of a parameter that FSDP2 knows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from aotdist.subclasses.fsdp import MODULE_RULE
from aotdist.subclasses.protocol import Policy


class Block(nn.Module):
    """Five rows on two ranks: uneven shards. A frozen parameter among trained ones."""

    def __init__(self, dim: int = 5) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.scale = nn.Parameter(torch.full((dim,), 0.5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """A tied embedding; a parameter of one row (empty shards); one that no forward uses."""

    def __init__(self, dim: int = 5, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(blocks))
        self.head = nn.Linear(dim, 11, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(3))

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x).to(self.gain.dtype)
        return x * self.gain

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens)).float().logsumexp(-1).mean()


def tokens(step: int = 0, rank: int | None = None) -> torch.Tensor:
    """Other tokens on every rank and at every step."""
    generator = torch.Generator().manual_seed(100 * step + (dist.get_rank() if rank is None else rank))
    return torch.randint(0, 11, (2, 3), generator=generator)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same initial values at every call."""
    torch.manual_seed(0)
    return make()


@dataclass
class Notes:
    """Remembers what `aotdist.origins.annotate` is asked, which it replaces."""

    seen: list[tuple[str, Policy | None]] = field(default_factory=list)

    def __call__(self, unit: str, policy: Policy | None = None) -> contextlib.AbstractContextManager[None]:
        self.seen.append((unit, policy))
        return contextlib.nullcontext()


@contextmanager
def captured(model: nn.Module) -> Iterator[None]:
    """Run `model` as if it were captured: prepared before, its hooks swapped meanwhile."""
    MODULE_RULE.check(model)
    MODULE_RULE.prepare(model)
    with MODULE_RULE.capturing(model):
        yield


def captured_step(model: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    """Forward and backward of a captured step."""
    with captured(model):
        loss = model(*args)
        loss.backward()
    MODULE_RULE.after_backward(model)
    return loss


def eager_step(model: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    """Forward and backward of FSDP2 itself."""
    loss = model(*args)
    loss.backward()
    return loss


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit: -0.0 is not 0.0."""
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(torch.uint8) if a.dim() else a.reshape(1).view(torch.uint8),
        b.contiguous().view(torch.uint8) if b.dim() else b.reshape(1).view(torch.uint8),
    )


def different_grads(a: nn.Module, b: nn.Module) -> list[str]:
    """Parameters whose gradients are not the same shard of the same bits; or None in one model only."""
    names = []
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        if p.grad is None or q.grad is None:
            same = p.grad is q.grad
        else:
            same = same_bits(p.grad._local_tensor, q.grad._local_tensor) and p.grad._spec == q.grad._spec
        names += [] if same else [name]
    return names


def compare_on(eager: nn.Module, compiled: nn.Module, step: int = 0) -> None:
    """One more step of each: the same loss, the same gradients."""
    batch = tokens(step)
    assert same_bits(eager_step(eager, batch), captured_step(compiled, batch))
    assert not (names := different_grads(eager, compiled)), (step, names)


def compare(make: Callable[[], nn.Module], steps: int = 2) -> tuple[nn.Module, nn.Module]:
    """Eager and captured, side by side: losses, and gradients that accumulate over the steps."""
    eager, compiled = seeded(make), seeded(make)
    for step in range(steps):
        compare_on(eager, compiled, step)
    return eager, compiled


def line(world: int) -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh("cpu", (world,))


def shard_blocks(model: Net, mesh: DeviceMesh, **options: Any) -> Net:
    """Each block a unit, the rest the root's."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
