"""Writes of sizes, strides, storages and history of inputs, and the final actions on results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from aotdist.aliasing.metadata import NAMED, Change, release_history
from aotdist.aliasing.view_log import ViewLog
from aotdist.errors import UnsupportedProgram
from aotdist.facts import Fresh, IsInput, MetadataWrite, NotATensor, OutputFact, Place, ViewOfOutput
from aotdist.program import OutIdx, PrimalIdx, Row, Slot
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.autograd import history_of, released_history, retains_grad
from aotdist.torch_seam.functional import memory_of
from aotdist.trace.failures import reshaped_unrecorded, retyped_unrecorded, unsupported
from aotdist.trace.stand_ins import Inputs, StandIn


@dataclass(frozen=True, slots=True)
class Metadata:
    """Writes to the metadata of inputs.

    Args:
        changes: what was done to each input, in order.
        written: numbers of the changes that are to be repeated outside.
        switched_on: inputs that begin to require grad.
    """

    changes: Mapping[PrimalIdx, list[Change]]
    written: frozenset[int]
    switched_on: tuple[PrimalIdx, ...]

    @classmethod
    def of(cls, inputs: Inputs, log: ViewLog) -> Metadata:
        """What was done to `inputs`.

        Raises:
            UnsupportedProgram: an input that shares memory with others was given other memory, or the
                history of views of one is forgotten.
        """
        row = inputs.row()
        switched_on = tuple(idx for idx, stand_in in row.enumerate() if _is_switched_on(stand_in))
        changes: dict[PrimalIdx, list[Change]] = defaultdict(list)
        written: list[int] = []
        for stand_in in row:
            _refuse_forgotten(stand_in, log)
        for number, change in enumerate(log.changes):
            idx = inputs.index_of(change.tensor)
            if idx is None or (idx in switched_on and not change.reshapes()):
                continue
            if change.moves() and not _stays_inside(change, row[idx]):
                raise refuse(row[idx], "and shares memory with another")
            example = row[idx].example
            if idx in switched_on:
                raise refuse(row[idx], "and begins to require grad")
            if example.requires_grad and torch.is_grad_enabled():
                _refuse_other_ends(change, row[idx])
            if example.requires_grad and change.moves() and change.tensor.size() != example.size():
                raise refuse(row[idx], "in another size than its gradient is to have")
            changes[idx].append(change)
            written.append(number)
        return cls(changes, frozenset(written), switched_on)

    def is_reshaped(self, idx: PrimalIdx) -> bool:
        """Whether an input was reshaped in place."""
        return any(change.reshapes() for change in self.changes.get(idx, ()))

    def moved(self, row: Row[PrimalIdx, StandIn]) -> Iterator[tuple[PrimalIdx, int]]:
        """The inputs that were moved to another storage, each with the position of a plain tensor."""
        for idx, changes in self.changes.items():
            if any(change.moves() or change.args for change in changes if change.reshapes()):
                yield from ((idx, leaf) for leaf in range(len(row[idx].plains)))

    def as_before(self, idx: PrimalIdx, stand_in: StandIn, *, history: bool) -> torch.Tensor:
        """An input in its first sizes and strides, with the values that it has now."""
        tensor = stand_in.tensor
        with torch.set_grad_enabled(history):
            for change in reversed(self.changes.get(idx, ())):
                tensor = change.before(tensor)
        return tensor

    def has_new_history(self, idx: PrimalIdx, stand_in: StandIn) -> bool:
        """Whether autograd recorded a write to the input, and the input keeps that history.

        Raises:
            UnsupportedProgram: the input was moved to other memory, too.
        """
        name = _name_of_history(stand_in.tensor)
        is_new = name != (None if stand_in.tensor is stand_in.leaf else NAMED)
        has_moved = any(change.moves() for change in self.changes.get(idx, ()))
        if is_new and has_moved and name is not None and "NotImplemented" not in name:
            raise refuse(stand_in, "beside a write that takes part in the backward")
        return stand_in.tensor.requires_grad and is_new and not has_moved

    def bumps(self, stand_in: StandIn, *, written: bool) -> int:
        """By how much the program raised an input's version counter."""
        if stand_in.derived:
            return 0
        if stand_in.tensor.is_inference():
            return int(written)  # a stand-in has no counter then; the real tensor is written once
        return stand_in.bumps()

    def counted(self, idx: PrimalIdx) -> int:
        """By how much these writes raised the version counter of an input."""
        return sum(change.bumps for change in self.changes.get(idx, ()))

    def repeated_bumps(self, row: Row[PrimalIdx, StandIn]) -> dict[PrimalIdx, int]:
        """By how much the counters rise again when these writes are repeated."""
        counting = (i for i in self.changes if not (row[i].derived or row[i].tensor.is_inference()))
        return {idx: self.counted(idx) for idx in counting}

    def taking_grad(self, row: Row[PrimalIdx, StandIn]) -> list[tuple[PrimalIdx, StandIn]]:
        """The inputs that get gradients; a leaf that the program detached requires grad again."""
        for stand_in in row:
            if stand_in.takes_grad and not stand_in.leaf.requires_grad:
                stand_in.leaf.requires_grad_(True)
        return [(idx, s) for idx, s in row.enumerate() if s.takes_grad or idx in self.switched_on]


def refuse(stand_in: StandIn, how: str) -> UnsupportedProgram:
    """An error for a write that cannot be repeated on the user's tensor."""
    return unsupported(
        f"`{stand_in.slot}` has its size, strides or storage written in place, {how}",
        "return the changed tensor instead of writing the input's metadata",
    )


def detached_and_written(slot: Slot) -> UnsupportedProgram:
    """An error for a leaf that gets a history: it would be no leaf, and get no gradient."""
    return unsupported(
        f"`{slot}` is a leaf that gives up its gradient in place, and is then written with history",
        "write a tensor of its own (`x = x.detach()`)",
    )


def _refuse_forgotten(stand_in: StandIn, log: ViewLog) -> None:
    """Refuse views that were made of a leaf, itself a view, before it is written: they become its base's."""
    example = stand_in.example
    if example.is_leaf and example.requires_grad and example._base is not None and stand_in.bumps():
        if log.has_outdated_views(stand_in.tensor):
            raise unsupported(
                f"`{stand_in.slot}`, a leaf and a view of another, is written after views of it are made",
                "make the views after the write, or under `no_grad`",
            )


def _refuse_other_ends(change: Change, stand_in: StandIn) -> None:
    """Refuse changes after which the gradients of a leaf would go elsewhere."""
    example, source = stand_in.example, next(iter(change.args), None)
    if change.op in _SETS and example.is_leaf:
        raise refuse(stand_in, "and gets a gradient")
    if change.reshapes() and not (change.moves() or change.grad):
        raise reshaped_unrecorded(f"`{stand_in.slot}` by `{change.op}`")
    if isinstance(source, torch.Tensor) and source.dtype != example.dtype:
        raise retyped_unrecorded(stand_in.slot, example.dtype, source.dtype)


_SETS = (torch.ops.aten.set_.default, torch.ops.aten.set_.source_Tensor)


def _stays_inside(change: Change, stand_in: StandIn) -> bool:
    """Whether no other input shares an input's memory, or the change resizes it within that memory."""
    if not (stand_in.derived or stand_in.spans):
        return True
    pairs = zip(plain_tensors(change.tensor), stand_in.plains, strict=False)
    return change.op is torch.ops.aten.resize_.default and all(memory_of(a) == memory_of(b) for a, b in pairs)


def _name_of_history(tensor: torch.Tensor) -> str | None:
    node = history_of(tensor) if tensor.requires_grad else None
    return None if node is None else node.name()


def _is_switched_on(stand_in: StandIn) -> bool:
    """Whether an input begins to require grad."""
    after = stand_in.tensor
    return after.requires_grad and not stand_in.example.requires_grad and after.is_leaf


def released_results(outs: Sequence[Any], inputs: Inputs, log: ViewLog) -> Mapping[int, str]:
    """Results whose autograd graph was freed, by identity, each with the error message of its backward.

    Inputs, views, and bases of results are not among them: of those, the backward is traced, and refused.
    """
    tensors = [out for out in outs if isinstance(out, torch.Tensor)]
    viewed = {id(base) for out in tensors for base in log.bases(out)}
    alone = [
        out
        for out in tensors
        if inputs.index_of(out) is None and id(out) not in viewed and not any(True for _ in log.bases(out))
    ]
    found = ((id(out), released_history(out)) for out in alone)
    return {key: error for key, error in found if error is not None}


def final_actions(
    outs: Sequence[Any],
    facts: Sequence[OutputFact],
    freed: Mapping[int, str],
    retained: Iterable[PrimalIdx],
) -> tuple[MetadataWrite, ...]:
    """What is done to results and inputs once all results are made.

    These are `retain_grad`, if the program called it, and a history whose backward raises, if the program
    freed the graph of a result (by `torch.autograd.grad`): eager returns that, and fails in the backward.

    Args:
        outs: what the program returned.
        facts: the fact of each of `outs`.
        freed: see `released_results`.
        retained: inputs that retain their gradients.
    """
    made = [_retaining(IsInput(idx)) for idx in retained]
    for position, (out, fact) in enumerate(zip(outs, facts, strict=True)):
        place = ViewOfOutput(OutIdx(position), ())
        if isinstance(fact, Fresh) and id(out) in freed:
            made.append(MetadataWrite(place, release_history, (freed[id(out)],), (), True, -1))
        is_made = not isinstance(fact, (NotATensor, IsInput))
        if is_made and retains_grad(out):
            made.append(_retaining(place))
    return tuple(made)


def _retaining(place: Place) -> MetadataWrite:
    return MetadataWrite(place, torch.Tensor.retain_grad, (), (), True, -1)
