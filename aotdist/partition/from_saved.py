"""Another backward of a program whose forward has run: it is made from what that forward saved.

What was not saved is computed again, from what was, or from inputs that are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch.fx import Node

from aotdist.errors import UnsupportedProgram
from aotdist.partition.builder import GraphBuilder
from aotdist.partition.traits import is_late, is_random
from aotdist.program import GRADIENT_ROLES, Graph, Slot, Split

_ORDER = ("primal", "saved", "buffer", "rng", "size", *GRADIENT_ROLES)


def from_saved(
    joint: Graph,
    earlier: Graph,
    split: Split,
    kept: Collection[Slot],
    first: Sequence[Slot] = (),
    gradients: Collection[Slot] = (),
) -> Graph:
    """The graph that computes the results of `joint` from what is available in the backward.

    Its arguments are kept inputs, saved values, sizes, gradients, what the backward writes, and the seed.

    Args:
        joint: the program with the other backward.
        earlier: the program with the first backward, as it was cut.
        split: the two halves of that.
        kept: slots of the plain inputs that are available in the backward, besides saved ones.
        first: slots that it takes, needed or not, before all others.
        gradients: slots of gradients that it takes, needed or not.

    Raises:
        UnsupportedProgram: it needs a value that is neither there nor can be computed again.
    """
    order = [node for node in joint.gm.graph.nodes if node.op != "output"]
    available = _available(joint, _saved(earlier, split), {*kept, *first})
    builder, named = GraphBuilder(joint.gm), joint.named_placeholders()
    needed = joint.ancestors((node for node in joint.results() if node is not None), stop=available)
    needed |= {named[slot] for slot in gradients}
    for slot in first:
        builder.placeholder(named[slot])
    rest = [(slot, node) for node, slot in available.items() if node in needed and slot not in first]
    rest.sort(key=lambda pair: _ORDER.index(pair[0].role))
    for _, node in rest:  # a saved value stands for an input that may have been written since
        builder.placeholder(node)
    for node in order:
        if node in needed and node not in available:
            _refuse_lost(node)
            builder.copy(node)
    results = [None if node is None else builder.env[node] for node in joint.results()]
    return builder.finish(results, (*first, *(slot for slot, _ in rest)), joint.outs)


def _saved(earlier: Graph, split: Split) -> dict[int, Slot]:
    """The names of saved values, by the serials of the nodes that compute them."""
    by_name = {node.name: node for node in earlier.gm.graph.nodes}
    arguments = earlier.named_placeholders()
    nodes = (
        arguments[split.saved_primals[slot]]
        if slot in split.saved_primals
        else by_name[slot.path.removeprefix("%")]
        for slot in split.saved
    )
    pairs = zip(nodes, split.saved, strict=True)
    return {node.meta["serial"]: slot for node, slot in pairs if "serial" in node.meta}


def _available(joint: Graph, saved: Mapping[int, Slot], kept: Collection[Slot]) -> dict[Node, Slot]:
    """The values that need not be computed, with the slots by which the new graph takes them."""
    available = {
        node: slot
        for slot, node in joint.named_placeholders().items()
        if slot in kept or slot.role in ("size", "buffer", "rng", *GRADIENT_ROLES)
    }
    for node in joint.gm.graph.nodes:
        slot = saved.get(node.meta.get("serial"))
        if slot is not None:
            available[node] = slot
    return available


def _refuse_lost(node: Node) -> None:
    if node.op == "placeholder":
        lost = f"needs `{node.name}`, which was not saved"
    elif not is_late(node) and is_random(node):
        lost = f"draws random numbers (`{node.target}`)"
    else:
        return
    raise UnsupportedProgram(
        f"another backward is asked for than was compiled, and it {lost}",
        stage="partition",
        fix="convert gradients to the kind of their results, and do without `create_graph=True`",
    )
