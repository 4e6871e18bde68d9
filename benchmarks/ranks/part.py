"""One rank's part in a scenario: what it is told, and how it writes down what it computes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import aotdist
from benchmarks.ranks.vocabulary import Way, timeout_s

Called = TypeVar("Called", bound=Callable[..., Any])

WIDTH = 8


@dataclass(frozen=True, slots=True)
class Diary:
    """A file in which a rank writes down what happens, line by line: it may die at any time.

    Args:
        file: where.
    """

    file: Path

    def write(self, what: str, **more: Any) -> None:
        """Add a line."""
        with self.file.open("a") as lines:
            lines.write(json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All lines; none if the rank never came so far."""
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []


@dataclass(frozen=True, slots=True)
class Part:
    """What a scenario is given on one rank.

    Args:
        odd: whether this rank does what the scenario says.
        way: how to run.
        diary: for what happens.
    """

    odd: bool
    way: Way
    diary: Diary

    @property
    def rank(self) -> int:
        """This rank's number."""
        return dist.get_rank()

    def compiled(self, what: Called, **settings: Any) -> Called:
        """`what`, compiled in this way; itself in eager. A module is compiled in place."""
        if self.way == "eager":
            return what
        chosen = {"rank_timeout_s": timeout_s(self.way), "cache_bytes": 0, **settings}
        made: Any = aotdist.compile(what, backend=self.way, settings=chosen)
        return made

    def sharded(self, model: nn.Module, **options: Any) -> nn.Module:
        """`model` with FSDP2 on each of its children and around them."""
        for child in model.children():
            if any(parameter.requires_grad for parameter in child.parameters()):
                fully_shard(child, **options)
        fully_shard(model, **options)
        return model

    def model(self, model: nn.Module, **settings: Any) -> nn.Module:
        """`model`, sharded and compiled."""
        return self.compiled(self.sharded(model), **settings)

    def batches(
        self, num_steps: int = 3, rows: int = 4, width: int = WIDTH
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """A batch of this rank's own for each step, which begins when it is taken."""
        for step in range(num_steps):
            generator = torch.Generator().manual_seed(100 * step + self.rank)
            self.begin()
            yield step, torch.randn(rows, width, generator=generator)

    def begin(self) -> None:
        """A step begins: seconds are counted from here."""
        self.diary.write("begins")

    def note(self, **values: float | torch.Tensor) -> None:
        """A step is finished, and these are its values."""
        numbers = {
            name: value.item() if isinstance(value, torch.Tensor) else value for name, value in values.items()
        }
        self.diary.write("finishes", values=numbers)

    def learn(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        """The rest of a step, from its loss on."""
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        self.note(loss=loss, weights=weights_of(model))

    def train(
        self,
        model: nn.Module,
        num_steps: int = 3,
        rows: int = 4,
        before: Callable[[int], object] = lambda step: None,
        between: Callable[[int], object] = lambda step: None,
    ) -> None:
        """Steps of SGD.

        Args:
            model: sharded, and compiled or not.
            num_steps: how many.
            rows: of a batch.
            before: called with the step's number before its forward.
            between: called with it between forward and backward.
        """
        optimizer = sgd(model)
        for step, x in self.batches(num_steps, rows):
            before(step)
            loss = model(x).square().mean()
            between(step)
            self.learn(model, optimizer, loss)


def everyone() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    return group


def twin() -> dist.ProcessGroup:
    """Another one of the same ranks."""
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)


def weights_of(model: nn.Module) -> float:
    """What a rank has of the model, as a number."""
    held = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(float(p.detach().double().abs().sum()) for p in held)


def mlp(*widths: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Sequential:
    """Linear layers of these widths; two of one size without any."""
    torch.manual_seed(0)
    sizes = widths or (WIDTH, WIDTH, WIDTH)
    pairs = zip(sizes[:-1], sizes[1:], strict=True)
    return nn.Sequential(*(nn.Linear(a, b, bias=bias, dtype=dtype) for a, b in pairs))


def plane() -> Any:
    """Four ranks as a 2 x 2 mesh."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
