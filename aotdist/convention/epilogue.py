"""Outputs that are inputs, or views of something, are rebuilt outside of the compiled region.

The region returns bases; views are replayed on them by the operations that made them, so that
`_base`, shared storage, `grad_fn` and writes through the alias are what eager gives. What the program did in
place to sizes, strides, storages and history is done in between: a view shows what its base was at the time.
Source: "Add an opaque epilogue in AOTAutograd for aliasing/mutations" (pytorch#85036).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

import torch

from aotdist.convention.layer import Call
from aotdist.convention.metadata import rewrite
from aotdist.convention.version import rewind
from aotdist.convention.view_log import ViewLog
from aotdist.facts import (
    Facts,
    Fresh,
    IsInput,
    Keep,
    Kept,
    MetadataWrite,
    NotATensor,
    OutputFact,
    Place,
    Step,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
    ViewStep,
)
from aotdist.program import NodeOutIdx, OutIdx, PrimalIdx, Program, Row


def replay(base: torch.Tensor, steps: Sequence[ViewStep], made: dict[int, torch.Tensor]) -> torch.Tensor:
    """Make the view of `base` that `steps` describe; `made` holds, by serial, what is no view itself."""
    for step in steps:
        if step.ends_views() and step.serial in made:
            base = made[step.serial]
            continue
        with torch.set_grad_enabled(step.grad):
            result = step.op(base, *step.args, **dict(step.kwargs))
        base = result if step.pick is None else result[step.pick]
        if step.ends_views():
            made[step.serial] = base
    return base


@dataclass(frozen=True, slots=True)
class EpiloguePlan:
    """What each output is, in terms of inputs and of the values that the region returns.

    Args:
        outputs: what each is.
        order: in which order to make them, and to write metadata.
        rewinds: by how much to set back version counters first.
    """

    outputs: Row[OutIdx, OutputFact]
    order: tuple[Step, ...]
    rewinds: tuple[tuple[PrimalIdx, int], ...] = ()

    def lift(self, call: Call) -> Call:
        """Rebuild the outputs from the region's values."""

        def lifted(primals: Sequence[Any]) -> list[Any]:
            building = _Building(self.outputs, primals, call(primals))
            for idx, count in self.rewinds:
                rewind(primals[idx], count)
            for item in self.order:
                match item:
                    case MetadataWrite():
                        building.rewrite(item)
                    case Keep(number=number, place=place):
                        building.keep(number, place)
                    case _:
                        building.output(item)
            return [building.output(idx) for idx in self.outputs.indices()]

        return lifted


class _Building:
    """The outputs of one call, while they are made."""

    def __init__(self, facts: Row[OutIdx, OutputFact], primals: Sequence[Any], values: Sequence[Any]) -> None:
        self._facts, self._primals, self._values = facts, primals, values
        self._built: dict[OutIdx, Any] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}

    def output(self, idx: OutIdx) -> Any:
        """An output; it is made once."""
        if idx not in self._built:
            fact = self._facts[idx]
            self._built[idx] = fact.value if isinstance(fact, NotATensor) else self._at(fact)
        return self._built[idx]

    def keep(self, number: int, place: Place) -> None:
        """Make a tensor for later."""
        self._kept[number] = self._at(place)

    def rewrite(self, write: MetadataWrite) -> None:
        """Do one write of metadata."""
        args = [self._at(arg) if isinstance(arg, Place) else arg for arg in write.args]
        data = None if write.data is None else self._values[write.data]
        rewrite(self._at(write.target), write, args, data)

    def _at(self, place: Place) -> torch.Tensor:
        match place:
            case Fresh(value=value):
                return self._values[value]
            case IsInput(input=source):
                return self._primals[source]
            case ViewOfInput(base=base, steps=steps):
                return replay(self._primals[base], steps, self._made)
            case ViewOfIntermediate(base=base, steps=steps):
                return replay(self._values[base], steps, self._made)
            case ViewOfOutput(base=base, steps=steps):
                return replay(self.output(base), steps, self._made)
            case Kept(number=number):
                return self._kept[number]
            case _:
                assert_never(place)


class Epilogue:
    """See `aotdist.convention.layer.Layer`."""

    def lower(self, program: Program[PrimalIdx], facts: Facts) -> tuple[Program[PrimalIdx], EpiloguePlan]:
        """The inner program returns one tensor for each fresh output and each base of a view."""
        holders = _holders(facts)

        def fn(*primals: Any) -> list[Any]:
            with ViewLog() as log:
                outs = program.fn(*primals)
            return [held(log, outs) for held in holders]

        return Program(fn, program.ins, program.examples), EpiloguePlan(
            facts.outputs, facts.order, facts.rewinds
        )


_Held: TypeAlias = Callable[[ViewLog, Sequence[Any]], torch.Tensor]
"""Finds the tensor that the region returns as one of its values."""


def _holders(facts: Facts) -> list[_Held]:
    """How to find each value: as an output, as the base of one, or as what a write of metadata speaks of."""
    found: dict[NodeOutIdx, _Held] = {}
    for idx, fact in facts.outputs.enumerate():
        if isinstance(fact, Fresh):
            found[fact.value] = functools.partial(_output, idx)
        elif isinstance(fact, ViewOfIntermediate):
            found.setdefault(fact.base, functools.partial(_base_of_output, idx))
    kept = {item.number: item.place for item in facts.order if isinstance(item, Keep)}
    for write in facts.metadata_writes():
        for position, given in enumerate(write.args):
            arg = kept[given.number] if isinstance(given, Kept) else given
            if isinstance(arg, Fresh):
                found.setdefault(arg.value, functools.partial(_source, write.number, position))
            elif isinstance(arg, ViewOfIntermediate):
                found.setdefault(arg.base, functools.partial(_source, write.number, position))
        if isinstance(write.target, Fresh):
            found.setdefault(write.target.value, functools.partial(_target, write.number))
        if write.data is not None:
            found.setdefault(write.data, functools.partial(_grown, write.number))
    return [found[NodeOutIdx(position)] for position in range(len(found))]


def _output(idx: OutIdx, log: ViewLog, outs: Sequence[Any]) -> torch.Tensor:
    return log.as_made(outs[idx])


def _base_of_output(idx: OutIdx, log: ViewLog, outs: Sequence[Any]) -> torch.Tensor:
    returned = {id(out) for out in outs}
    return log.as_made(log.root(outs[idx], returned)[0])


def _source(number: int, position: int, log: ViewLog, _outs: Sequence[Any]) -> torch.Tensor:
    return log.as_made(log.root(log.changes[number].args[position], ())[0])


def _target(number: int, log: ViewLog, _outs: Sequence[Any]) -> torch.Tensor:
    return log.as_made(log.changes[number].tensor)


def _grown(number: int, log: ViewLog, _outs: Sequence[Any]) -> torch.Tensor:
    grown = log.changes[number].grown
    assert grown is not None, "it grew in the trace"
    return grown


EPILOGUE = Epilogue()
