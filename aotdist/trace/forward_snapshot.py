"""Tensors that the backward writes: it reads them as they are when it runs, not as the forward left them.

With `retain_graph=True` a backward runs twice, and the second run reads what the first one wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch.fx import Node

from aotdist.program import PrimalIdx, Row, Slot
from aotdist.subclasses.protocol import Recipe, leaves
from aotdist.torch_seam.operators import OpOverload, makes_views
from aotdist.trace.recorder import Recorder
from aotdist.trace.stand_ins import StandIn


def nodes_of_inputs(recorder: Recorder, row: Row[PrimalIdx, StandIn]) -> dict[PrimalIdx, list[Node]]:
    """The nodes of what each input holds now; none for inputs that have no memory of their own."""
    return {
        idx: [] if one.derived or one.spans else [recorder.value(plain) for plain in one.plains]
        for idx, one in row.enumerate()
    }


def read_late(
    recorder: Recorder,
    row: Row[PrimalIdx, StandIn],
    writes: Collection[PrimalIdx],
    forward_end: Mapping[PrimalIdx, list[Node]],
) -> None:
    """Let the backward read what it writes from new arguments of the graph (role `buffer`).

    Args:
        recorder: recorded it.
        row: the inputs.
        writes: those that it writes.
        forward_end: `nodes_of_inputs` when the forward was over; inputs that came later are missing.
    """
    for idx in writes:
        stand_in = row[idx]
        before = forward_end.get(idx)
        if before is None:
            names = (Slot("primal", stand_in.slot.path, inner) for inner, _ in leaves(stand_in.recipe))
            before = [recorder.placeholder(name) for name in names]
        if before:
            _read_late(recorder, stand_in.slot.path, stand_in.recipe, before)


def is_read_again(written: Collection[Node], results: Sequence[tuple[Slot, Node | None]]) -> bool:
    """Whether results of the backward are computed from values of the forward that it overwrites.

    A second backward would need the new values, which are not kept.
    """
    over, seen = set(written), set[Node]()
    pending = [node for _, node in results if node is not None] if over else []
    while pending:
        node = pending.pop()
        if node in seen or node.meta.get("phase") != "backward":
            continue
        seen.add(node)
        if not over.isdisjoint(node.all_input_nodes):
            return True
        pending += node.all_input_nodes
    return False


def _read_late(recorder: Recorder, path: str, recipe: Recipe, before: Sequence[Node]) -> None:
    for node, (inner, leaf) in zip(before, leaves(recipe), strict=True):
        fake = recorder.fake_like(leaf, node.meta["val"].device)
        held = recorder.value(recorder.argument(Slot("buffer", path, inner), fake))
        first = next((n for n in node.graph.nodes if n.meta.get("phase") == "backward"), None)
        if first is not None:
            _read_instead(node, held, first)


def _read_instead(node: Node, held: Node, first: Node) -> None:
    """Let the backward (from `first` on) read `held` for `node`, and its views for those of `node`."""
    for user in list(node.users):
        if user.meta.get("phase") == "backward":
            user.replace_input_with(node, held)
        elif isinstance(user.target, OpOverload) and makes_views(user.target) and user.args[0] is node:
            with node.graph.inserting_before(first):
                view = node.graph.node_copy(user, lambda read: held if read is node else read)
            view.meta["phase"] = "backward"
            _read_instead(user, view, first)
            if not view.users:
                node.graph.erase_node(view)
