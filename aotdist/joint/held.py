"""What the caller will hold of the differentiable tensors of a program, and may watch the gradients of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aotdist.facts import (
    DataWritten,
    Fresh,
    InputFact,
    IsInput,
    MetadataWrite,
    OutputView,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
)
from aotdist.joint.classify import NodeOutputs
from aotdist.joint.inputs import StandIn
from aotdist.joint.waypoints import HeldTensor
from aotdist.program import OutIdx, PrimalIdx, Row
from aotdist.torch_seam.autograd import history_of


def held_tensors(
    outs: Sequence[Any],
    outputs: NodeOutputs,
    writes: Row[PrimalIdx, InputFact],
    row: Row[PrimalIdx, StandIn],
) -> list[HeldTensor]:
    """Results, and inputs that have another history after the call.

    Args:
        outs: what the program returned.
        outputs: what that is.
        writes: what happened to each input.
        row: the inputs.
    """
    held = [
        HeldTensor(str(outputs.slots[idx]), Fresh(idx), idx, outputs.tensors[idx])
        for idx in sorted(outputs.with_history)
        if outputs.slots[idx].role == "output"
    ]
    for idx, fact in writes.enumerate():
        if isinstance(fact, DataWritten) and fact.differentiable:
            held.append(HeldTensor(str(row[idx].slot), IsInput(idx), fact.value, row[idx].tensor))
    held += _views_of_written(row)
    held += _reshaped(outputs, row)
    for position, (out, fact) in enumerate(zip(outs, outputs.facts, strict=True)):
        is_view = isinstance(fact, (ViewOfInput, ViewOfIntermediate, ViewOfOutput)) and fact.steps
        if is_view and out.grad_fn is not None:
            held.append(HeldTensor(f"out[{position}]", OutputView(OutIdx(position)), None, out))
    return held


def _views_of_written(row: Row[PrimalIdx, StandIn]) -> Iterator[HeldTensor]:
    """Inputs that are made again as views, and have the history of their base since it was written."""
    written = {id(one.tensor) for one in row if not one.derived and one.bumps()}
    for idx, stand_in in row.enumerate():
        view = stand_in.tensor
        if stand_in.derived and id(view._base) in written and history_of(view) is not None:
            yield HeldTensor(str(stand_in.slot), IsInput(idx), None, view)


def _reshaped(outputs: NodeOutputs, row: Row[PrimalIdx, StandIn]) -> Iterator[HeldTensor]:
    """Inputs that show their elements in another way: what is computed of them then is computed of a view."""
    targets = [act.target for act in outputs.order if isinstance(act, MetadataWrite) and act.number >= 0]
    for idx in dict.fromkeys(target.input for target in targets if isinstance(target, IsInput)):
        if row[idx].tensor.grad_fn is not None:
            yield HeldTensor(str(row[idx].slot), IsInput(idx), None, row[idx].tensor)
