"""Results of a forward graph: views of its temporaries, and version counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from aotdist.aliasing.version import count_as
from aotdist.codegen.contract import Emitted
from aotdist.convention.subclass import UnwrapPlan
from aotdist.facts import NodeOut
from aotdist.partition.traits import is_getitem, is_view, is_wait
from aotdist.program import Call, Graph, NodeOutIdx
from aotdist.subclasses.protocol import Plain, leaves

Versions: TypeAlias = "Mapping[NodeOutIdx, int]"
"""Version counters that outputs are to have."""


def result_views(graph: Graph) -> frozenset[int]:
    """Positions of the results that a graph makes as views of temporaries of its own.

    They must be detached. What was a tensor of its own in the user's program, written in place and then
    functionalised, must not be known to autograd as a view that was made inside of a node. And a compiler
    may have dropped a view that changes nothing, so that one tensor is two results: a node would return
    both as differentiable, or neither. What lies in a wrapper is not returned itself: there it may be the
    same tensor twice, as offsets of jagged tensors are.
    """
    first: dict[Node | None, int] = {}
    return frozenset(
        position
        for position, (slot, node) in enumerate(zip(graph.outs, graph.results(), strict=True))
        if node is not None
        and (is_view(node) or (not slot.inner and first.setdefault(node, position) != position))
    )


def detached_views(results: Sequence[Any], views: frozenset[int]) -> list[Any]:
    """`results` with those at `views` detached, which keeps memory and version counter."""
    return [value.detach() if position in views else value for position, value in enumerate(results)]


def versions_to_set(unwrap: UnwrapPlan, outs: Sequence[NodeOut], graph: Graph, emitted: Emitted) -> Versions:
    """The version counters to set on outputs, where they might differ from eager's.

    Args:
        unwrap: how outputs are put together.
        outs: what the region returns.
        graph: the forward graph.
        emitted: what runs in its place.
    """
    found, results = dict(unwrap.versions), graph.results()
    position = 0
    for idx, recipe in unwrap.outs.enumerate():
        node, version = results[position], outs[idx].version
        position += sum(1 for _ in leaves(recipe))
        if version is None or not isinstance(recipe, Plain):
            continue
        if version or _is_counted(node, emitted):
            found[idx] = version
    return found


def saved_beside(value: torch.Tensor) -> torch.Tensor:
    """A value to save, where version counters are set: autograd refuses views from before that."""
    return value.detach() if value._is_view() else value  # pyright: ignore[reportPrivateUsage]


def setting_versions(call: Call, versions: Versions) -> Call:
    """`call`, which also sets the version counters of what it returns."""

    def counted(primals: Sequence[Any]) -> list[Any]:
        outs = call(primals)
        count_as(outs, versions)
        return outs

    return counted


def _is_counted(node: Node | None, emitted: Emitted) -> bool:
    """Whether a result that a graph makes may have been written in place to autograd, other than in eager.

    Operators that no tensor is given to (`ones`, `arange`) fill what they return, where autograd looks on;
    the functions of `torch` do so where it does not.
    """
    while node is not None and (is_view(node) or is_getitem(node)):
        node = node.all_input_nodes[0]
    if node is None or node.op != "call_function" or is_wait(node):  # collectives count in eager, too
        return False
    given = (before.meta.get("val") for before in node.all_input_nodes)
    return emitted.counts_writes or not any(isinstance(value, torch.Tensor) for value in given)
