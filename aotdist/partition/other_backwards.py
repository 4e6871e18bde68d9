"""Other backwards of a program than the one that was cut with its forward.

Of some outputs. A backward is linear in its tangents. So with some tangents absent, a value that depends on
these alone is zero: it is not computed, a sum with it is the other summand, and a gradient that is zero is
absent, as in eager. Zeros are made only where an operation mixes them with other values. (Zeros for absent
tangents instead would turn -0.0 into 0.0, give NaN where the derivative is infinite, and cost as much as if
all tangents were given.)

From what an earlier forward saved. What was not saved is computed again, from what was, or from inputs that
are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch.fx import Node

from aotdist.errors import UnsupportedProgram
from aotdist.partition.builder import GraphBuilder, needed_by
from aotdist.partition.traits import is_effectful, is_late, is_random
from aotdist.program import GRADIENT_ROLES, Graph, Slot, Split
from aotdist.torch_seam.symbols import surely_equal

_ADD = torch.ops.aten.add.Tensor


def without_tangents(backward: Graph, missing: Collection[Slot], *, any_strides: bool) -> Graph:
    """The backward that takes all but the `missing` tangents; results that are zero then are None.

    Args:
        backward: the graph.
        missing: arguments that are left out.
        any_strides: whether its values may have other strides than their `val`s.
    """
    zero = _zeros(backward, missing)
    results = [None if node in zero else node for node in backward.results()]
    order = [node for node in backward.gm.graph.nodes if node.op != "output"]
    stands_for = _summands(order, zero, any_strides=any_strides)
    roots = [node for node in results if node is not None]
    roots += [node for node in order if is_effectful(node) and node not in zero]
    needed = needed_by(roots, order, stands_for, skipped=zero)
    builder = GraphBuilder(backward.gm)
    for node in order:
        if node.op == "placeholder":
            if node not in zero:
                builder.placeholder(node)
        elif node in stands_for:
            if stands_for[node] in builder.env:
                builder.env[node] = builder.env[stands_for[node]]
        elif node in needed:
            _make_zeros(builder, node, zero)
            builder.copy(node)
    ins = [slot for slot in backward.ins if slot not in missing]
    return builder.finish([None if n is None else builder.env[n] for n in results], ins, backward.outs)


def _zeros(backward: Graph, missing: Collection[Slot]) -> set[Node]:
    """Nodes that depend on missing tangents and on no other."""
    tangents = {
        node: slot for slot, node in backward.named_placeholders().items() if slot.role in GRADIENT_ROLES
    }
    depends: dict[Node, bool] = {}
    """Of nodes that depend on tangents: whether on one that is not missing."""
    for node in backward.gm.graph.nodes:
        if node in tangents:
            depends[node] = tangents[node] not in missing
        elif node.op != "output" and any(i in depends for i in node.all_input_nodes):
            # A summand that depends on no tangent (`zeros_like(self)` of a formula) counts, as in eager.
            counts = node.target is _ADD
            depends[node] = any(depends.get(i, counts) for i in node.all_input_nodes)
    return {node for node, is_given in depends.items() if not is_given}


def _summands(order: list[Node], zero: set[Node], *, any_strides: bool) -> Mapping[Node, Node]:
    """Sums of which one summand is zero, with the other; never chained."""
    replaced: dict[Node, Node] = {}
    for node in order:
        if node.target is _ADD and node not in zero and not node.kwargs:
            for summand, other in (node.args, reversed(node.args)):
                if summand in zero and isinstance(other, Node) and _interchangeable(node, other, any_strides):
                    replaced[node] = replaced.get(other, other)
    return replaced


def _interchangeable(a: Node, b: Node, any_strides: bool) -> bool:
    first, second = a.meta["val"], b.meta["val"]
    if first.dtype != second.dtype or not surely_equal(first.size(), second.size()):
        return False
    return any_strides or surely_equal(first.stride(), second.stride())


def _make_zeros(builder: GraphBuilder, node: Node, zero: set[Node]) -> None:
    """Zeros for the inputs of `node` that are zero, each made once."""
    for source in node.all_input_nodes:
        if source in zero and source not in builder.env:
            value: torch.Tensor = source.meta["val"]
            val = value.new_empty(value.size())
            made = builder.call(
                torch.ops.aten.full.default,
                ([builder.number(size) for size in value.size()], 0),
                like=source,
                name=f"{source.name}_zero",
                val=val,
            )
            made.kwargs = {"dtype": value.dtype, "device": value.device}
            builder.env[source] = made


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
