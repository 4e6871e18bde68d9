"""The backward of some results where it was traced by itself; see `aotdist.joint.backward`."""

from __future__ import annotations

from collections.abc import Collection

from aotdist.facts import Choice, Facts
from aotdist.partition.returning import returning
from aotdist.program import Graph, PrimalIdx, Row, Slot


def without_choices(backward: Graph, facts: Facts, ins: Row[PrimalIdx, Slot]) -> Graph:
    """`backward` with the results of the whole alone; `ins` names the inputs."""
    of_choices = {slot for choice in facts.backward.choices for slot in choice.slots(ins, facts.recipes)}
    if not of_choices:
        return backward
    return returning(backward, [slot for slot in backward.outs if slot not in of_choices])


def choice_without(facts: Facts, missing: Collection[Slot]) -> Choice | None:
    """The choice for when the tangents `missing` are, if there is one."""
    absent = {slot.path for slot in missing}
    arrived = [idx for idx, out in facts.node_outs.enumerate() if out.differentiable]
    arrived = tuple(idx for idx in arrived if facts.node_outs[idx].slot.path not in absent)
    return next((choice for choice in facts.backward.choices if choice.outs == arrived), None)
