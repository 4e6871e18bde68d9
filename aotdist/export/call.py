"""What is exported: one call, and the inputs that its graph shall take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from aotdist.capture.modules import StatePlace, StateTensor


@dataclass(frozen=True, slots=True, eq=False)
class Input:
    """One input of the graph.

    Args:
        path: its name in messages; that of a parameter or a buffer is its qualified name.
        value: a tensor, or a constant.
        kind: where it comes from.
    """

    path: str
    value: Any
    kind: Literal["parameter", "buffer", "argument"]

    def requires_grad(self) -> bool:
        """Whether the loss is differentiated for it."""
        return isinstance(self.value, torch.Tensor) and self.value.requires_grad


@dataclass(frozen=True, slots=True)
class Call:
    """What is exported.

    Args:
        target: the module or function.
        args: positional arguments.
        kwargs: keyword arguments.
        state: parameters and buffers under each of their names, and where each hangs.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: tuple[tuple[Input, StatePlace], ...]

    def tied(self) -> list[tuple[int, StateTensor]]:
        """State that hangs in a second place: its position, and that place."""
        first: dict[int, StatePlace] = {}
        return [
            (position, StateTensor(leaf.path, leaf.value, (place,)))
            for position, (leaf, place) in enumerate(self.state)
            if not _same_place(first.setdefault(id(leaf.value), place), place)
        ]


def _same_place(a: StatePlace, b: StatePlace) -> bool:
    return a[0] is b[0] and a[1] == b[1]


def state_of(mod: nn.Module) -> tuple[tuple[Input, StatePlace], ...]:
    """Parameters, then buffers, of a module and all below it, under each of their names."""
    found: list[tuple[Input, StatePlace]] = []

    def add(kind: Literal["parameter", "buffer"], path: str, value: torch.Tensor) -> None:
        prefix, _, name = path.rpartition(".")
        place = vars(mod.get_submodule(prefix))[f"_{kind}s"], name
        found.append((Input(path, value, kind), place))

    for path, value in mod.named_parameters(remove_duplicate=False):
        add("parameter", path, value)
    for path, value in mod.named_buffers(remove_duplicate=False):
        add("buffer", path, value)
    return tuple(found)
