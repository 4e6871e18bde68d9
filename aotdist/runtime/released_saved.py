"""Backwards of one result after the other, without `retain_graph`: what is kept for those still to come.

When the backward of some results is over, autograd frees all that the node saved. In eager, results that
share no autograd nodes with these can still be differentiated: what their nodes saved is still there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from aotdist.aliasing.version import version_of
from aotdist.program import GRADIENT_ROLES, Graph, NodeOutIdx, Slot
from aotdist.torch_seam.autograd import keeps_graph


@dataclass(frozen=True, slots=True)
class SavedSharing:
    """What the backwards of several results share.

    Args:
        freed: see `BackwardFacts.freed`.
        saved: for each result, positions of the saved values that its backward computes with.
    """

    freed: frozenset[frozenset[NodeOutIdx]]
    saved: Mapping[NodeOutIdx, frozenset[int]]

    @classmethod
    def of(
        cls,
        freed: frozenset[frozenset[NodeOutIdx]],
        backward: Graph,
        tangents: Mapping[NodeOutIdx, Sequence[Slot]],
        num_saved: int,
    ) -> SavedSharing:
        """What they share in a graph.

        Args:
            freed: see `BackwardFacts.freed`.
            backward: the graph; its first arguments are the saved values.
            tangents: names of the gradients of each result.
            num_saved: how many values are saved.
        """
        arguments = backward.named_placeholders()
        gradients = {node for slot, node in arguments.items() if slot.role in GRADIENT_ROLES}
        position = {node: k for k, node in enumerate(list(arguments.values())[:num_saved])}
        from_gradients = backward.descendants(gradients)
        made_of: dict[Node, frozenset[int]] = {}
        for node in backward.gm.graph.nodes:
            inputs = (made_of[each] for each in node.all_input_nodes if each not in from_gradients)
            made_of[node] = frozenset({position[node]} if node in position else ()).union(*inputs)
        saved: dict[NodeOutIdx, frozenset[int]] = {}
        for idx, slots in tangents.items():
            reached = backward.descendants(arguments[slot] for slot in slots)
            saved[idx] = frozenset[int]().union(*map(made_of.__getitem__, reached))
        return cls(freed, saved)

    def are_apart(self, one: Collection[NodeOutIdx], other: Collection[NodeOutIdx]) -> bool:
        """Whether the backward of `one` frees nothing that the backward of `other` needs."""
        return all(together.isdisjoint(one) or together.isdisjoint(other) for together in self.freed)


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left when the backward of some results was run, without the graph being retained.

    Args:
        spent: the results whose backward was run.
        values: all saved values (a compiled graph takes all), each with its version counter; None if no other
            result can still be differentiated.
    """

    spent: frozenset[NodeOutIdx]
    values: tuple[tuple[torch.Tensor, int], ...] | None


def saved_for(ctx: Any, arrived: Collection[NodeOutIdx], shares: SavedSharing) -> list[torch.Tensor]:
    """The saved values, for the backward of some results.

    Raises:
        RuntimeError: those that it needs were freed, or written since; autograd's own error.
    """
    rest: Rest | None = getattr(ctx, "rest", None)
    if rest is None or rest.values is None or not shares.are_apart(rest.spent, arrived):
        return list(ctx.saved_tensors)
    needed = (rest.values[k] for idx in arrived for k in shares.saved[idx])
    if any(version_of(value) != version for value, version in needed):
        return list(ctx.saved_tensors)
    return [value for value, _ in rest.values]


def keep_for_others(
    ctx: Any, arrived: Collection[NodeOutIdx], saved: Sequence[torch.Tensor], shares: SavedSharing
) -> None:
    """Keep what results that share nothing with `arrived` need, unless the graph is retained anyway."""
    if keeps_graph():
        return
    rest: Rest | None = getattr(ctx, "rest", None)
    spent = frozenset(arrived) | (frozenset() if rest is None else rest.spent)
    if not any(idx not in spent and shares.are_apart(spent, [idx]) for idx in shares.saved):
        ctx.rest = Rest(spent, None)
    elif rest is None:
        # Without their history: a saved result would keep its own node alive.
        ctx.rest = Rest(spent, tuple((value.detach(), version_of(value)) for value in saved))
    else:
        ctx.rest = Rest(spent, rest.values)
