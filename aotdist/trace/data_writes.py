"""Inputs whose data a program wrote: which of them get new values, and these values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch

from aotdist.aliasing.memory import covers, may_repeat
from aotdist.facts import DataWritten, InputFact, Untouched
from aotdist.program import PrimalIdx, Row, Slot
from aotdist.subclasses.protocol import is_wrapper, leaves, plain_tensors
from aotdist.torch_seam.autograd import is_leaf_with_grad
from aotdist.torch_seam.functional import FunctionalTensor, data_writes, functional_storage_id
from aotdist.torch_seam.tensors import storage_id
from aotdist.trace.backward import Result
from aotdist.trace.metadata import Metadata, detached_and_written
from aotdist.trace.outputs import NodeOutputs
from aotdist.trace.recorder import Recorder
from aotdist.trace.stand_ins import StandIn


def forward_writes(
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


def backward_writes(
    recorder: Recorder,
    row: Row[PrimalIdx, StandIn],
    before: Sequence[tuple[tuple[int, ...], int]],
    metadata: Metadata,
) -> tuple[dict[PrimalIdx, int], list[Result]]:
    """Inputs that the backward wrote, and how often; their new values."""
    writes: dict[PrimalIdx, int] = {}
    results: list[Result] = []
    # An input that the backward was the first to touch has no count from before: nothing was written then.
    padded = [*before, *[((), 0)] * (len(row) - len(before))]
    for idx, stand_in in row.enumerate():
        counts, (counted, bumps) = stand_in.writes(), padded[idx]
        if stand_in.derived or counts == (counted or (0,) * len(counts)):
            continue
        writes[idx] = stand_in.bumps() - bumps
        plains = metadata.plains_as_before(idx, stand_in)
        for (inner, _), plain in zip(leaves(stand_in.recipe), plains, strict=True):
            results.append((Slot("backward_write", stand_in.slot.path, inner), recorder.value(plain)))
    return writes, results


def counts_of_results(tensors: Sequence[torch.Tensor], row: Row[PrimalIdx, StandIn]) -> list[tuple[int, ...]]:
    """How often each of the node's results was written; empty for those in memory of inputs."""
    of_inputs = {functional_storage_id(plain) for one in row for plain in one.plains}

    def counts(tensor: torch.Tensor) -> tuple[int, ...]:
        plains = [plain for plain in plain_tensors(tensor) if isinstance(plain, FunctionalTensor)]
        if any(functional_storage_id(plain) in of_inputs for plain in plains):
            return ()
        return tuple(map(data_writes, plains))

    return list(map(counts, tensors))
