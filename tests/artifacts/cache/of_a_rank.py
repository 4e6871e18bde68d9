"""Programs that hold something of the rank that traced them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

Program = Callable[[torch.Tensor], torch.Tensor]


def groups_of_one() -> list[dist.ProcessGroup]:
    """A group for each rank, which every rank knows."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())]


def written_row(rank: int) -> Program:
    def program(x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros_like(x)
        made[rank] = x[rank] * 2
        return made

    return program


def chosen(rank: int) -> Program:
    """The rank's number stands in a branch, which is a graph of its own."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * (rank + 2), lambda x: x - (rank + 2), (x,))

    return program


def of_a_group(rank: int) -> Program:
    group = groups_of_one()[rank]
    return lambda x: collectives.all_reduce(x * 2, "sum", group)


def gathering_twice(x: torch.Tensor) -> torch.Tensor:
    """The same on every rank. Inductor can merge the two in a buffer, whose part of the rank it writes."""
    first = collectives.all_gather_tensor(x * 2, 0, dist.group.WORLD)
    second = collectives.all_gather_tensor(x + 1, 0, dist.group.WORLD)
    return first * second


OF_A_RANK: dict[str, Callable[[int], Program]] = {
    "a slice": lambda rank: lambda x: x[rank * 2 : rank * 2 + 2] * 3,
    "a scale": lambda rank: lambda x: x * (rank + 2),
    "a fraction": lambda rank: lambda x: x * (0.1 * rank + 0.3),
    "an offset": lambda rank: lambda x: x + torch.arange(rank * 4, rank * 4 + 3),
    "a stride": lambda rank: lambda x: x.as_strided((2, 2), (3, 1), rank) * 2,
    "a rotation": lambda rank: lambda x: x.roll(rank + 1, 0) * 2,
    "a tensor": lambda rank: lambda x: x * torch.tensor([rank + 1.0, 2.0, 3.0]),
    "a tensor that is full of it": lambda rank: lambda x: x * torch.full((3,), rank + 2.0),
    "a mask": lambda rank: lambda x: x * torch.tensor([rank == 0, rank == 1, True]),
    "a dtype": lambda rank: lambda x: (x * 3).to(torch.float64 if rank else torch.bfloat16).float(),
    "a dtype of a tensor": lambda rank: (
        lambda x: x * torch.tensor([1, 2, 3], dtype=torch.int64 if rank else torch.int32)
    ),
    "a sign of zero": lambda rank: lambda x: x.clamp(min=-0.0 if rank else 0.0) * 2,
    "an infinity": lambda rank: lambda x: x.clamp(max=math.inf if rank else 1e30) * 2,
    "True for 1": lambda rank: lambda x: x + (True if rank else 1),
    "a row that is written": written_row,
    "a branch": chosen,
    "a seed": lambda rank: lambda x: x + (1234 + rank),
}
"""By what they hold; made for a rank, called on a tensor of 4 by 3."""
