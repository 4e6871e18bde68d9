"""What the backward reads of the inputs that it writes: what they hold when it runs, not after the forward.

With `retain_graph=True` a backward runs twice, and the second run meets what the first one wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from aotdist.facts import BackwardWrite
from aotdist.joint.inputs import StandIn
from aotdist.joint.recorder import Recorder
from aotdist.program import PrimalIdx, Row, Slot
from aotdist.subclasses.protocol import leaves


@dataclass(frozen=True, slots=True)
class ForwardEnd:
    """What each input holds once the forward is over.

    Args:
        nodes: of each input that has memory of its own, the nodes of what is beneath it.
        num_inputs: how many inputs the program has met.
    """

    nodes: dict[PrimalIdx, list[Node]]
    num_inputs: int

    @classmethod
    def of(cls, recorder: Recorder, row: Row[PrimalIdx, StandIn]) -> ForwardEnd:
        """Read it off, now."""
        own = [(idx, one) for idx, one in row.enumerate() if not (one.derived or one.spans)]
        return cls({idx: [recorder.value(plain) for plain in one.plains] for idx, one in own}, len(row))

    def read_late(
        self, recorder: Recorder, row: Row[PrimalIdx, StandIn], writes: Sequence[BackwardWrite]
    ) -> None:
        """Let the backward read new arguments of the graph in the place of inputs that it writes."""
        for write in writes:
            stand_in = row[write.input]
            before = self.nodes.get(write.input, [])
            if write.input >= self.num_inputs:  # the backward is the first to meet it
                names = (Slot("primal", stand_in.slot.path, inner) for inner, _ in leaves(stand_in.recipe))
                before = [recorder.placeholder(name) for name in names]
            for node, (inner, leaf) in zip(before, leaves(stand_in.recipe), strict=bool(before)):
                fake = recorder.fake_like(leaf, node.meta["val"].device)
                held = recorder.value(recorder.argument(Slot("buffer", stand_in.slot.path, inner), fake))
                for user in list(node.users):
                    if user.meta.get("phase") == "backward":
                        user.replace_input_with(node, held)
