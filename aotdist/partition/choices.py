"""The backward of some results where it was traced by itself; see `aotdist.joint.backward`."""

from __future__ import annotations

from collections.abc import Collection

from aotdist.facts import Facts
from aotdist.partition.returning import returning
from aotdist.program import Graph, Slot


def without_choices(backward: Graph, facts: Facts) -> Graph:
    """`backward` with the results of the whole alone."""
    if not facts.choices:
        return backward
    of_choices = {choice.slot(slot) for choice in facts.choices for slot in backward.outs}
    return returning(backward, [slot for slot in backward.outs if slot not in of_choices])


def chosen(by_choice: Graph, whole: Graph, missing: Collection[Slot], facts: Facts) -> Graph:
    """The backward for when tangents are missing: the whole, or that of a choice under the same names."""
    absent = {slot.path for slot in missing}
    arrived = [idx for idx, out in facts.node_outs.enumerate() if out.differentiable]
    arrived = tuple(idx for idx in arrived if facts.node_outs[idx].slot.path not in absent)
    for choice in facts.choices:
        if choice.outs == arrived:
            return returning(by_choice, [choice.slot(slot) for slot in whole.outs], names=whole.outs)
    return whole
