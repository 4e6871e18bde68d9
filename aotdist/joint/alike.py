"""Whether two runs of a backward have recorded the same operations."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.fx import Node

from aotdist.joint.proxies import Recorder
from aotdist.program import PrimalIdx
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam import pytree


def are_computed_alike(
    recorder: Recorder, ones: Mapping[PrimalIdx, torch.Tensor], others: Mapping[PrimalIdx, torch.Tensor]
) -> bool:
    """Whether two sets of gradients are computed alike from the arguments of the graph."""
    first, second = (
        [recorder.value(plain) for grad in grads.values() for plain in plain_tensors(grad)]
        for grads in (ones, others)
    )
    if ones.keys() != others.keys() or len(first) != len(second):
        return False
    numbers = _numbers(first[0].graph) if first else {}
    return all(numbers[one] == numbers[other] for one, other in zip(first, second, strict=True))


def _numbers(graph: torch.fx.Graph) -> Mapping[Node, int]:
    """A number for each node, the same for those that compute the same."""
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
