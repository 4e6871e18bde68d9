"""What a traced program did to its inputs' sizes, strides and history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from aotdist.convention.view_log import ChangeOfMetadata, ViewLog
from aotdist.errors import UnsupportedProgram
from aotdist.facts import MetadataWrite
from aotdist.joint.inputs import Inputs, StandIn
from aotdist.program import PrimalIdx, Row
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam import OpOverload

_ATEN = torch.ops.aten
_RESIZES = frozenset({_ATEN.resize_.default, _ATEN.resize_as_.default})

_INVERSES: Mapping[OpOverload, Callable[[torch.Tensor, ChangeOfMetadata], torch.Tensor]] = {
    _ATEN.t_.default: lambda tensor, _: tensor.t(),
    _ATEN.transpose_.default: lambda tensor, change: tensor.transpose(*change.args),
    _ATEN.unsqueeze_.default: lambda tensor, change: tensor.squeeze(*change.args),
    _ATEN.squeeze_.default: lambda tensor, change: tensor.view(change.size),
    _ATEN.squeeze_.dim: lambda tensor, change: tensor.view(change.size),
    _ATEN.squeeze_.dims: lambda tensor, change: tensor.view(change.size),
}
"""Operators that show the same elements in another way, and how to see them as before."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """Writes to the metadata of inputs.

    Args:
        writes: in order.
        switched_on: inputs that begin to require grad.
        reshapes: what was done to the sizes and strides of each input, in order.
    """

    writes: tuple[MetadataWrite, ...]
    switched_on: tuple[PrimalIdx, ...]
    reshapes: Mapping[PrimalIdx, list[ChangeOfMetadata]]

    @classmethod
    def of(cls, inputs: Inputs, log: ViewLog) -> Metadata:
        """What was done to `inputs`.

        Raises:
            UnsupportedProgram: an input's storage was written, or its size in another way.
        """
        writes: list[MetadataWrite] = []
        reshapes: dict[PrimalIdx, list[ChangeOfMetadata]] = defaultdict(list)
        for change in log.metadata:
            idx = inputs.index_of(change.tensor)
            if idx is None:
                continue
            if change.op in _RESIZES and change.tensor.size() == change.size:
                continue
            if change.op in _INVERSES:
                reshapes[idx].append(change)
            else:
                raise refuse(inputs.row()[idx], f"by `{change.op}`")
            writes.append(MetadataWrite(idx, change.op, change.args, change.kwargs, change.grad))
        row = inputs.row()
        for idx, stand_in in row.enumerate():
            if stand_in.example.requires_grad and not stand_in.tensor.requires_grad:
                # Done by autograd itself, which the log does not see.
                writes.append(_switched_off(idx, stand_in))
        switched_on = tuple(idx for idx, stand_in in row.enumerate() if _is_switched_on(stand_in))
        return cls(tuple(writes), switched_on, reshapes)

    def is_reshaped(self, idx: PrimalIdx) -> bool:
        """Whether an input shows its elements in another way now."""
        return idx in self.reshapes

    def as_before(self, idx: PrimalIdx, stand_in: StandIn, *, history: bool) -> torch.Tensor:
        """An input in its sizes and strides of before, with what it holds now."""
        tensor = stand_in.tensor
        with torch.set_grad_enabled(history):
            for change in reversed(self.reshapes.get(idx, ())):
                tensor = _INVERSES[change.op](tensor, change)
        return tensor

    def plains_as_before(self, idx: PrimalIdx, stand_in: StandIn) -> Sequence[torch.Tensor]:
        """The plain tensors beneath it."""
        return plain_tensors(self.as_before(idx, stand_in, history=False))

    def other_bumps(self, idx: PrimalIdx, stand_in: StandIn, *, written: bool) -> int:
        """By how much an input's version counter went up by anything else than these writes."""
        if stand_in.derived:
            return 0
        if stand_in.tensor.is_inference():
            return int(written)  # nobody counts for a stand-in then; the real tensor is written once
        # Each reshape counts as a write; `detach_` does not.
        return stand_in.bumps() - len(self.reshapes.get(idx, ()))

    def taking_grad(self, row: Row[PrimalIdx, StandIn]) -> list[tuple[PrimalIdx, StandIn]]:
        """The inputs that get gradients; leaves that gave that up are leaves once more."""
        for stand_in in row:
            if stand_in.takes_grad and not stand_in.leaf.requires_grad:
                stand_in.leaf.requires_grad_(True)
        return [(idx, s) for idx, s in row.enumerate() if s.takes_grad or idx in self.switched_on]


def refuse(stand_in: StandIn, how: str) -> UnsupportedProgram:
    """An error for a write that cannot be repeated on the user's tensor."""
    return UnsupportedProgram(
        f"`{stand_in.slot}` has its size, strides or storage written in place, {how}",
        stage="joint",
        fix="return the changed tensor instead of writing the input's metadata",
    )


def _switched_off(idx: PrimalIdx, stand_in: StandIn) -> MetadataWrite:
    if stand_in.example.is_leaf:
        return MetadataWrite(idx, torch.Tensor.requires_grad_, (False,), (), True)
    return MetadataWrite(idx, torch.Tensor.detach_, (), (), True)


def _is_switched_on(stand_in: StandIn) -> bool:
    after = stand_in.tensor
    return after.requires_grad and not stand_in.example.requires_grad and after.is_leaf
