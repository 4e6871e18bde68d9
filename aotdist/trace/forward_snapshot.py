"""Tensors that the backward writes: it reads them as they are when it runs, not as the forward left them.

With `retain_graph=True` a backward runs twice, and the second run reads what the first one wrote.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from aotdist.program import PrimalIdx, Row, Slot
from aotdist.subclasses.protocol import Recipe, leaves
from aotdist.torch_seam.functional import functional_value, is_functional_base, replace_functional_value
from aotdist.torch_seam.operators import OpOverload, makes_views
from aotdist.trace.recorder import Recorder
from aotdist.trace.stand_ins import StandIn


@dataclass(frozen=True, slots=True)
class ForwardEnd:
    """What each input holds once the forward is over.

    Args:
        nodes: for each input that has memory of its own, the nodes of its plain tensors.
        values: for each input, the values of its plain tensors.
        counters: for each input, its version counters.
    """

    nodes: dict[PrimalIdx, list[Node]]
    values: list[Sequence[torch.Tensor]]
    counters: list[Sequence[int]]

    @classmethod
    def of(cls, recorder: Recorder, row: Row[PrimalIdx, StandIn]) -> ForwardEnd:
        """The values and version counters of the inputs now."""
        own = [(idx, one) for idx, one in row.enumerate() if not (one.derived or one.spans)]
        return cls(
            {idx: [recorder.value(plain) for plain in one.plains] for idx, one in own},
            [one.values() for one in row],
            [one.counters() for one in row],
        )

    def restore(self, row: Row[PrimalIdx, StandIn]) -> None:
        """Give the stand-ins these values and version counters; those that came later, their first ones.

        Then the backward can be traced again: to autograd, no saved tensor has been written.
        """
        later = list(row)[len(self.values) :]
        values = [*self.values, *(one.first_values for one in later)]
        counters = [*self.counters, *(one.first_counters for one in later)]
        for stand_in, held, counts in zip(row, values, counters, strict=True):
            for plain, value in zip(stand_in.plains, held, strict=True):
                if is_functional_base(plain) and functional_value(plain) is not value:
                    replace_functional_value(plain, value)
            stand_in.count_again_from(counts)

    def read_late(
        self, recorder: Recorder, row: Row[PrimalIdx, StandIn], writes: Collection[PrimalIdx]
    ) -> None:
        """Let the backward read what it writes from new arguments of the graph (role `buffer`)."""
        for idx in writes:
            stand_in = row[idx]
            before = self.nodes.get(idx, [])
            if idx >= len(self.values):  # the backward is the first to meet it
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
