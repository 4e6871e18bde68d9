"""Another backward of a program whose forward has run: it is made from what that forward saved.

What was not saved is computed again, from what was, or from inputs that are kept.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from aotdist.errors import UnsupportedProgram
from aotdist.partition.again import is_late
from aotdist.partition.builder import GraphBuilder
from aotdist.partition.traits import is_collective, is_random
from aotdist.program import GRADIENT_ROLES, Graph, Slot, Split


def from_saved(joint: Graph, split: Split, kept: Collection[Slot]) -> Graph:
    """The graph of the results of `joint`: saved values, sizes, kept inputs, tangents, seed -> gradients.

    Args:
        joint: the program with the other backward.
        split: how it was cut when it had the first.
        kept: names of the plain inputs that are there in the backward, besides saved ones.

    Raises:
        UnsupportedProgram: it needs a value that is neither there nor can be computed again.
    """
    there = _there(joint, split, kept)
    needed = _needed(joint, there)
    builder = GraphBuilder(joint.gm)
    ins: list[Slot] = []
    for node in joint.gm.graph.nodes:
        if node in needed and node in there:
            builder.placeholder(node)
            ins.append(there[node])
    for node in joint.gm.graph.nodes:
        if node in needed and node not in there:
            _refuse_lost(node)
            builder.copy(node)
    results = [None if node is None else builder.env[node] for node in joint.results()]
    return builder.finish(results, ins, joint.outs)


def _there(joint: Graph, split: Split, kept: Collection[Slot]) -> dict[Node, Slot]:
    """The values that need not be computed, by the names that the new graph takes them by."""
    saved = {slot.path.removeprefix("%"): slot for slot in split.saved if slot not in split.saved_primals}
    primals = {primal: slot for slot, primal in split.saved_primals.items()}
    there: dict[Node, Slot] = {}
    for slot, node in joint.named_placeholders().items():
        if slot in primals:
            there[node] = primals[slot]
        elif slot in kept or slot.role in ("size", "rng", *GRADIENT_ROLES):
            there[node] = slot
    for node in joint.gm.graph.nodes:
        # What this backward added may be called as something that a pass made.
        if node.name in saved and node not in there and not is_late(node):
            there[node] = saved[node.name]
    return there


def _needed(joint: Graph, there: Collection[Node]) -> set[Node]:
    needed = {node for node in joint.results() if node is not None}
    for node in reversed(joint.gm.graph.nodes):
        if node in needed and node not in there:
            needed.update(node.all_input_nodes)
    return needed


def _refuse_lost(node: Node) -> None:
    if node.op == "placeholder":
        lost = f"needs `{node.name}`, which was not saved"
    elif not is_late(node) and is_random(node):
        lost = f"draws random numbers (`{node.target}`)"
    elif not is_late(node) and is_collective(node):
        lost = f"communicates (`{node.target}`)"
    else:
        return
    raise UnsupportedProgram(
        f"a gradient is another kind of tensor than its result, and the backward for it {lost}",
        stage="partition",
        fix="convert it before calling `backward`",
    )
