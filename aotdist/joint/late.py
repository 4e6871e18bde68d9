"""What the backward finds in the inputs that it writes: what they hold when it runs, not after the forward.

With `retain_graph=True` a backward runs twice, and the second run meets what the first one wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from aotdist.facts import BackwardWrite
from aotdist.joint.inputs import StandIn
from aotdist.joint.recorder import Recorder
from aotdist.program import PrimalIdx, Row, Slot
from aotdist.subclasses.protocol import leaves
from aotdist.torch_seam.functional import functional_value, is_functional_base, replace_functional_value


@dataclass(frozen=True, slots=True)
class ForwardEnd:
    """What each input holds once the forward is over.

    Args:
        nodes: of each input that has memory of its own, the nodes of what is beneath it.
        values: of each input, the values of what is beneath it.
        counters: of each input, its version counters.
    """

    nodes: dict[PrimalIdx, list[Node]]
    values: list[Sequence[torch.Tensor]]
    counters: list[Sequence[int]]

    @classmethod
    def of(cls, recorder: Recorder, row: Row[PrimalIdx, StandIn]) -> ForwardEnd:
        """Read it off, now."""
        own = [(idx, one) for idx, one in row.enumerate() if not (one.derived or one.spans)]
        return cls(
            {idx: [recorder.value(plain) for plain in one.plains] for idx, one in own},
            [one.values() for one in row],
            [one.counters() for one in row],
        )

    def restore(self, row: Row[PrimalIdx, StandIn]) -> None:
        """Let the stand-ins be as they were then; those that came later, as they came.

        The backward can be traced once more after that: autograd finds nothing written that it saved.
        """
        later = list(row)[len(self.values) :]
        values = [*self.values, *(one.met for one in later)]
        counters = [*self.counters, *((one.version, *one.versions) for one in later)]
        for stand_in, held, counts in zip(row, values, counters, strict=True):
            for plain, value in zip(stand_in.plains, held, strict=True):
                if is_functional_base(plain) and functional_value(plain) is not value:
                    replace_functional_value(plain, value)
            stand_in.count_again_from(counts)

    def read_late(
        self, recorder: Recorder, row: Row[PrimalIdx, StandIn], writes: Sequence[BackwardWrite]
    ) -> None:
        """Let the backward read new arguments of the graph in the place of inputs that it writes."""
        for write in writes:
            stand_in = row[write.input]
            before = self.nodes.get(write.input, [])
            if write.input >= len(self.values):  # the backward is the first to meet it
                names = (Slot("primal", stand_in.slot.path, inner) for inner, _ in leaves(stand_in.recipe))
                before = [recorder.placeholder(name) for name in names]
            for node, (inner, leaf) in zip(before, leaves(stand_in.recipe), strict=bool(before)):
                fake = recorder.fake_like(leaf, node.meta["val"].device)
                held = recorder.value(recorder.argument(Slot("buffer", stand_in.slot.path, inner), fake))
                for user in list(node.users):
                    if user.meta.get("phase") == "backward":
                        user.replace_input_with(node, held)
