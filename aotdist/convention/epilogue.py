"""Outputs that are inputs, or views of something, are rebuilt outside of the compiled region.

The region returns bases; views are replayed on them by the operations that made them, so that
`_base`, shared storage, `grad_fn` and writes through the alias are what eager gives. Source: "Add an
opaque epilogue in AOTAutograd for aliasing/mutations" (pytorch#85036).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

import torch

from aotdist.convention.function_view import function_view
from aotdist.convention.layer import Call
from aotdist.convention.view_log import ViewLog
from aotdist.facts import (
    Facts,
    Fresh,
    FunctionView,
    IsInput,
    NotATensor,
    OutputFact,
    Step,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
)
from aotdist.program import NodeOutIdx, OutIdx, PrimalIdx, Program, Row


def replay(
    base: torch.Tensor, steps: Sequence[Step], values: Sequence[Any], made: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Make the view of `base` that `steps` describe.

    Args:
        base: what to view.
        steps: how.
        values: what the region returned.
        made: by serial, what is no view itself.
    """
    for step in steps:
        if isinstance(step, FunctionView):
            base = function_view(base, values[step.value], viewer(step), step.creation)
            continue
        if step.ends_views() and step.serial in made:
            base = made[step.serial]
            continue
        with torch.set_grad_enabled(step.grad):
            result = step.op(base, *step.args, **dict(step.kwargs))
        base = result if step.pick is None else result[step.pick]
        if step.ends_views():
            made[step.serial] = base
    return base


def viewer(step: FunctionView) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes the views inside of a user's autograd function."""
    return lambda base: replay(base, step.steps, (), {})


@dataclass(frozen=True, slots=True)
class EpiloguePlan:
    """What each output is, in terms of inputs and of the values that the region returns.

    Args:
        outputs: what each is.
        order: in which order to make them.
    """

    outputs: Row[OutIdx, OutputFact]
    order: tuple[OutIdx, ...]

    def lift(self, call: Call) -> Call:
        """Rebuild the outputs from the region's values."""

        def lifted(primals: Sequence[Any]) -> list[Any]:
            values = call(primals)
            built: dict[OutIdx, Any] = {}
            made: dict[int, torch.Tensor] = {}
            for idx in self.order:
                self._build(idx, primals, values, built, made)
            return [built[idx] for idx in self.outputs.indices()]

        return lifted

    def _build(
        self,
        idx: OutIdx,
        primals: Sequence[Any],
        values: Sequence[Any],
        built: dict[OutIdx, Any],
        made: dict[int, torch.Tensor],
    ) -> Any:
        if idx in built:
            return built[idx]
        match fact := self.outputs[idx]:
            case NotATensor(value=value):
                out = value
            case Fresh(value=value):
                out = values[value]
            case IsInput(input=source):
                out = primals[source]
            case ViewOfInput(base=base, steps=steps):
                out = replay(primals[base], steps, values, made)
            case ViewOfIntermediate(base=base, steps=steps):
                out = replay(values[base], steps, values, made)
            case ViewOfOutput(base=base, steps=steps):
                out = replay(self._build(base, primals, values, built, made), steps, values, made)
            case _:
                assert_never(fact)
        built[idx] = out
        return out


class Epilogue:
    """See `aotdist.convention.layer.Layer`."""

    def lower(self, program: Program[PrimalIdx], facts: Facts) -> tuple[Program[PrimalIdx], EpiloguePlan]:
        """The inner program returns one tensor for each fresh output and each base of a view."""
        holders = _holders(facts)

        def fn(*primals: Any) -> list[Any]:
            with ViewLog() as log:
                outs = program.fn(*primals)
            returned = {id(out) for out in outs}
            return [hold(outs[idx], returned, log) for idx, hold in holders]

        return Program(fn, program.ins, program.examples), EpiloguePlan(facts.outputs, facts.order)


_Hold: TypeAlias = Callable[[torch.Tensor, Container[int], ViewLog], Any]


def _holders(facts: Facts) -> list[tuple[OutIdx, _Hold]]:
    """For each value, an output that tells it, and how."""
    found: dict[NodeOutIdx, tuple[OutIdx, _Hold]] = {}
    for idx, fact in facts.outputs.enumerate():
        if isinstance(fact, Fresh):
            found[fact.value] = (idx, _itself)
        if isinstance(fact, ViewOfIntermediate):
            found.setdefault(fact.base, (idx, _base))
        if isinstance(fact, (ViewOfInput, ViewOfIntermediate, ViewOfOutput)):
            for step in fact.steps:
                if isinstance(step, FunctionView):
                    found.setdefault(step.value, (idx, _from_function))
    return [found[NodeOutIdx(position)] for position in range(len(found))]


def _itself(out: torch.Tensor, returned: Container[int], log: ViewLog) -> Any:
    return out


def _base(out: torch.Tensor, returned: Container[int], log: ViewLog) -> Any:
    return log.root(out, returned).base


def _from_function(out: torch.Tensor, returned: Container[int], log: ViewLog) -> Any:
    return log.root(out, returned).function


EPILOGUE = Epilogue()
