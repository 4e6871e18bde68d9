"""What a run of a backward has computed, and whether another run has recorded the same operations."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from aotdist.joint.recorder import Recorder
from aotdist.program import PrimalIdx
from aotdist.subclasses.protocol import Recipe, plain_tensors, recipe_of
from aotdist.torch_seam.trees import pytree


@dataclass(frozen=True, slots=True)
class Computed:
    """What a run of a backward has computed.

    Args:
        grads: the gradients of inputs.
        kept: the tensors that user code in it keeps.
    """

    grads: Mapping[PrimalIdx, torch.Tensor]
    kept: tuple[torch.Tensor, ...]

    def recipes(self) -> tuple[dict[PrimalIdx, Recipe], tuple[Recipe, ...]]:
        """The recipes of the gradients, and of the tensors that are kept."""
        return {idx: recipe_of(grad) for idx, grad in self.grads.items()}, tuple(map(recipe_of, self.kept))

    def is_like(self, recorder: Recorder, other: Computed) -> bool:
        """Whether the other run has recorded the same operations."""
        ones, others = (
            [recorder.value(plain) for tensor in each.tensors() for plain in plain_tensors(tensor)]
            for each in (self, other)
        )
        if self.grads.keys() != other.grads.keys() or len(ones) != len(others):
            return False
        numbers = _numbers(ones[0].graph) if ones else {}
        return all(numbers[one] == numbers[other] for one, other in zip(ones, others, strict=True))

    def tensors(self) -> list[torch.Tensor]:
        """The gradients, then the tensors that are kept."""
        return [*self.grads.values(), *self.kept]


def _numbers(graph: torch.fx.Graph) -> Mapping[Node, int]:
    """A number for each node; nodes that compute the same (value numbering) have the same."""
    known: dict[Hashable, int] = {}
    numbers: dict[Node, int] = {}

    def told(value: Any) -> Hashable:
        return numbers[value] if isinstance(value, Node) else (type(value), repr(value))

    for node in graph.nodes:
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        is_computed = node.op == "call_function"
        key = (node.target, str(spec), tuple(map(told, leaves))) if is_computed else node
        numbers[node] = known.setdefault(key, len(known))
    return numbers
