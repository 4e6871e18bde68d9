"""What the forward of a program did, read off its trace before a backward writes anything."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.aliasing.memory import covers, may_repeat
from aotdist.aliasing.view_log import ViewLog
from aotdist.facts import (
    DataWritten,
    Fresh,
    InputFact,
    NodeOut,
    Untouched,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
)
from aotdist.program import NodeOutIdx, PrimalIdx, Row, Slot
from aotdist.sizes import NumberStep, numbers_of_data
from aotdist.subclasses.protocol import (
    is_wrapper,
    leaves,
    plain_tensors,
    recipe_of,
    refuse_unknown_subclass,
    same_layout,
)
from aotdist.torch_seam.autograd import is_leaf_with_grad
from aotdist.torch_seam.functional import data_writes, functional_value, metadata_written, storage_changes
from aotdist.torch_seam.tensors import storage_id
from aotdist.trace.backward import End, Result, requires_grad_by_itself, value_results
from aotdist.trace.capture_mode import CaptureMode
from aotdist.trace.context import TraceContext
from aotdist.trace.metadata import (
    Metadata,
    detached_and_written,
    final_actions,
    refuse,
    released_results,
)
from aotdist.trace.outputs import NodeOutputs
from aotdist.trace.stand_ins import Inputs, StandIn


@dataclass(frozen=True, slots=True)
class ForwardEffects:
    """What the forward did.

    Args:
        outs: what the program returned.
        outputs: what that is, and what the node returns for it.
        metadata: the writes to sizes, strides, storage and history that are repeated outside.
        writes: what happened to each input.
        rewinds: see `Facts.rewinds`.
        is_rewritten: whether inputs, or results once they are made, change shape or history.
        node_outs: what the node returns.
        results: the values of that.
        capture_mode: the mode that it ran in, which has noted questions, hooks and retained gradients.
        numbers: see `Facts.numbers`.
    """

    outs: Sequence[Any]
    outputs: NodeOutputs
    metadata: Metadata
    writes: Row[PrimalIdx, InputFact]
    rewinds: tuple[tuple[PrimalIdx, int], ...]
    is_rewritten: bool
    node_outs: Row[NodeOutIdx, NodeOut]
    results: list[Result]
    capture_mode: CaptureMode
    numbers: tuple[tuple[str, NodeOutIdx | NumberStep], ...]

    def ends(self) -> list[End]:
        """The differentiable results."""
        tensors = self.outputs.tensors
        return [(idx, tensors[idx]) for idx, out in self.node_outs.enumerate() if out.differentiable]


def read_forward(context: TraceContext, outs: Sequence[Any], capture_mode: CaptureMode) -> ForwardEffects:
    """What the forward did; read before a backward writes anything.

    Args:
        context: the context of the trace.
        outs: what it returned.
        capture_mode: the mode that it ran in.
    """
    recorder, inputs, log = context.recorder, context.inputs, context.log
    metadata = Metadata.of(inputs, log)
    _mark_reshaped(context, metadata)
    freed = released_results(outs, inputs, log) if capture_mode.ran_backward else {}
    outputs = NodeOutputs(outs, inputs, log, metadata.written, freed)
    numbers = _return_numbers(context, outputs)
    row = inputs.row()
    context.refuse_accumulation()
    for idx, one in row.enumerate():
        _refuse_write(one, reshaped=metadata.is_reshaped(idx))
    writes, rewinds = _forward_writes(row, outputs, metadata)
    node_outs = Row[NodeOutIdx, NodeOut](
        NodeOut(
            slot,
            recipe_of(tensor),
            context.options.training and idx in outputs.with_history,
        )
        for idx, (slot, tensor) in enumerate(zip(outputs.slots, outputs.tensors, strict=True))
    )
    for node_out, tensor in zip(node_outs, outputs.tensors, strict=True):
        refuse_unknown_subclass(tensor, node_out.slot.path)
        if node_out.differentiable and tensor.is_leaf:
            raise requires_grad_by_itself(node_out.slot)
    _refuse_own_leaves(outs, outputs, inputs, log)
    is_rewritten = bool(metadata.written) or any(not isinstance(act, int) for act in outputs.order)
    outputs.order = (*outputs.order, *final_actions(outs, outputs.facts, freed, capture_mode.retained))
    results = value_results(recorder, node_outs, outputs.tensors)
    return ForwardEffects(
        outs=outs,
        outputs=outputs,
        metadata=metadata,
        writes=writes,
        rewinds=rewinds,
        is_rewritten=is_rewritten,
        node_outs=node_outs,
        results=results,
        capture_mode=capture_mode,
        numbers=numbers,
    )


def _return_numbers(
    context: TraceContext, outputs: NodeOutputs
) -> tuple[tuple[str, NodeOutIdx | NumberStep], ...]:
    """Let the graph return the numbers that depend on data and are needed outside of it.

    In training these are all, as it is not known yet which of them the backward needs.
    """
    unbacked = context.recorder.unbacked
    if unbacked is None:
        return ()
    needed = unbacked.numbers
    if not context.options.training:
        recipes = [recipe_of(tensor) for tensor in outputs.tensors]
        needed = numbers_of_data([outputs.facts, outputs.order, recipes])
    found: list[tuple[str, NodeOutIdx | NumberStep]] = []
    for name, source in context.recorder.sources_of_numbers(needed):
        is_step = isinstance(source, NumberStep)
        found.append((name, source if is_step else outputs.add(Slot("output", name), source, history=False)))
    unbacked.returned = frozenset(name for name, _ in found)
    return tuple(found)


def _mark_reshaped(context: TraceContext, metadata: Metadata) -> None:
    """Mark arguments that are reshaped in place: a view of one gets another history, so none may be saved."""
    for idx in metadata.changes:
        stand_in = context.inputs.row()[idx]
        for inner, _ in leaves(stand_in.recipe):
            context.recorder.placeholder(Slot("primal", stand_in.slot.path, inner)).meta["reshaped"] = True


def _refuse_write(stand_in: StandIn, *, reshaped: bool) -> None:
    if not reshaped and not same_layout(stand_in.recipe, recipe_of(stand_in.tensor)):
        raise refuse(stand_in, "by an operator that lays the result out otherwise")
    for (_, leaf), plain in zip(leaves(stand_in.recipe), stand_in.plains, strict=True):
        # `out=` gives an empty tensor another size, and no counter shows it.
        resized = data_writes(plain) and functional_value(plain).size() != leaf.size
        if storage_changes(plain) or (not reshaped and (resized or metadata_written(plain))):
            raise refuse(stand_in, "in a way that is not repeated outside")


def _refuse_own_leaves(outs: Sequence[Any], outputs: NodeOutputs, inputs: Inputs, log: ViewLog) -> None:
    """Refuse results that are leaves which begin to require grad in the program, or views of such.

    The autograd node of the program is not their history: they would be leaves of the caller's.
    """
    for position, (out, fact) in enumerate(zip(outs, outputs.facts, strict=True)):
        made = isinstance(fact, (Fresh, ViewOfInput, ViewOfIntermediate, ViewOfOutput))
        for tensor in (out, *log.bases_by_operators(out)) if made and out.requires_grad else ():
            begins = any(change.op is torch.Tensor.requires_grad_ for change in log.changes_of(tensor))
            if begins and is_leaf_with_grad(tensor) and inputs.index_of(tensor) is None:
                raise requires_grad_by_itself(Slot("output", f"out[{position}]"))


# Inputs whose data the forward wrote: which of them get new values, and these values.


def _forward_writes(
    row: Row[PrimalIdx, StandIn],
    outputs: NodeOutputs,
    metadata: Metadata,
) -> tuple[Row[PrimalIdx, InputFact], tuple[tuple[PrimalIdx, int], ...]]:
    """What the forward did to each input; the new values become node outputs, those with history first.

    Returns:
        the facts, and how many of the counted writes of each input will be repeated; see `Facts.rewinds`.
    """
    with_history = {idx for idx, stand_in in row.enumerate() if metadata.has_new_history(idx, stand_in)}
    facts: list[InputFact] = [Untouched(metadata.bumps(stand_in, written=False)) for stand_in in row]
    repeated = metadata.repeated_bumps(row)
    written = _written_by_name(row, metadata)
    for differentiable in (True, False):
        for idx, stand_in in written:
            # A leaf written under `no_grad` still requires grad, but its new value has no history.
            if (idx in with_history) is differentiable:
                if differentiable and is_leaf_with_grad(stand_in.example):
                    raise detached_and_written(stand_in.slot)
                slot = Slot("write", stand_in.slot.path)
                tensor = metadata.as_before(idx, stand_in, history=differentiable)
                value = outputs.add(slot, tensor, history=differentiable)
                bumps = metadata.bumps(stand_in, written=True)
                if differentiable:  # it is counted where it is written, after the region
                    bumps -= repeated.pop(idx, 0)
                facts[idx] = DataWritten(value, differentiable, bumps)
    return Row(facts), tuple(sorted((idx, count) for idx, count in repeated.items() if count))


def _written_by_name(row: Row[PrimalIdx, StandIn], metadata: Metadata) -> list[tuple[PrimalIdx, StandIn]]:
    """The inputs to copy new values into.

    Of several that share memory these are the ones that the program wrote by name, as the others see the
    write; and others that show more memory than these, since a write by `.data` has no name.

    A view of a DTensor may be a copy: a write to it leaves the DTensor's data alone, and gives it a history.
    """
    written = [
        (idx, s)
        for idx, s in row.enumerate()
        if not s.derived and (any(s.writes()) or _is_written_as_a_copy(idx, s, metadata))
    ]
    named: dict[int, list[torch.Tensor]] = defaultdict(list)
    for plain in (plain for _, s in written if s.bumps() for plain in plain_tensors(s.example)):
        named[storage_id(plain)].append(plain)
    once: dict[int, list[torch.Tensor]] = defaultdict(list)
    for plain in (plain for _, s in written for plain in plain_tensors(s.example) if not may_repeat(plain)):
        once[storage_id(plain)].append(plain)
    return [(idx, s) for idx, s in written if s.bumps() or not _has_another_name(s, named, once)]


def _is_written_as_a_copy(idx: PrimalIdx, stand_in: StandIn, metadata: Metadata) -> bool:
    """Whether a wrapper got a history by a write that did not change its data."""
    written = is_wrapper(stand_in.tensor) and stand_in.bumps() > metadata.counted(idx)
    return written and metadata.has_new_history(idx, stand_in)


def _has_another_name(
    stand_in: StandIn,
    named: Mapping[int, Sequence[torch.Tensor]],
    once: Mapping[int, Sequence[torch.Tensor]],
) -> bool:
    """Whether all written memory of an input belongs to others, which are written by name.

    An input that shows elements twice cannot be copied into; then others that show each `once` will do.
    """
    repeats = any(map(may_repeat, plain_tensors(stand_in.example)))
    return _is_seen_through(stand_in, named) or (repeats and _is_seen_through(stand_in, once))


def _is_seen_through(stand_in: StandIn, named: Mapping[int, Sequence[torch.Tensor]]) -> bool:
    """Whether all written memory of an input is shown by these tensors, here by storage."""
    pairs = zip(stand_in.writes(), plain_tensors(stand_in.example), strict=True)
    return all(
        not count or any(covers(other, plain) for other in named.get(storage_id(plain), ()))
        for count, plain in pairs
    )
