"""Sizes that whoever brings a graph left open, as Dynamo does: symbols in the sizes of its example arguments.

Dynamo passes such sizes as numbers beside the tensors that have them. Here each is read off its tensor, so
that it is a size like any other; a number that is the size of none is a constant of each call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from aotdist.torch_seam.symbols import expression, is_open


@dataclass(frozen=True, slots=True)
class OpenSizes:
    """What of some arguments is open.

    Args:
        dims: the dimensions of each tensor, by its position, that may differ from call to call.
        places: of each argument that is such a size, by position: which argument has it, in which dimension.
    """

    dims: Mapping[int, frozenset[int]]
    places: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, mod: nn.Module, args: Sequence[Any]) -> OpenSizes:
        """Read them off example arguments, or, of a graph of Dynamo's, off what it says of these."""
        shown = _examples(mod, args)
        found: dict[str, tuple[int, int]] = {}
        dims: dict[int, set[int]] = {}
        for position, dim, size in _open_dims(shown):
            found.setdefault(expression(size), (position, dim))
            dims.setdefault(position, set()).add(dim)
        numbers = ((k, value) for k, value in enumerate(shown) if isinstance(value, torch.SymInt))
        places = {k: found[name] for k, value in numbers if (name := expression(value)) in found}
        return cls({position: frozenset(some) for position, some in dims.items()}, places)

    def left_out(self, args: Sequence[Any]) -> list[Any]:
        """The arguments without those that are read off others."""
        return [value for position, value in enumerate(args) if position not in self.places]

    def put_in(self, args: Sequence[Any]) -> list[Any]:
        """All arguments again."""
        remaining = iter(args)
        count = len(args) + len(self.places)
        values: list[Any] = [0 if position in self.places else next(remaining) for position in range(count)]
        for position, (owner, dim) in self.places.items():
            values[position] = values[owner].size(dim)
        return values

    def by_identity(self, args: Sequence[Any]) -> dict[int, frozenset[int]]:
        """The open dimensions of arguments without those that are left out, by the identity of the tensor."""
        positions = (k for k in range(len(args) + len(self.places)) if k not in self.places)
        at = zip(positions, args, strict=True)
        return {id(value): self.dims[position] for position, value in at if position in self.dims}


def _examples(mod: nn.Module, args: Sequence[Any]) -> list[Any]:
    """The arguments, with symbols for sizes where a graph of Dynamo's has some."""
    if not isinstance(mod, GraphModule):
        return list(args)
    nodes = mod.graph.find_nodes(op="placeholder")
    if len(nodes) != len(args):
        return list(args)
    return [node.meta.get("example_value", value) for node, value in zip(nodes, args, strict=True)]


def _open_dims(examples: Sequence[Any]) -> Iterator[tuple[int, int, Any]]:
    for position, example in enumerate(examples):
        if isinstance(example, torch.Tensor):
            for dim, size in enumerate(example.shape):
                if is_open(size):
                    yield position, dim, size
