"""Outputs that are inputs, or views of something, are rebuilt outside of the compiled region.

The region returns bases; views are replayed on them by the operations that made them, so that
`_base`, shared storage, `grad_fn` and writes through the alias are what eager gives. Source: "Add an
opaque epilogue in AOTAutograd for aliasing/mutations" (pytorch#85036).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
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
    ViewStep,
)
from aotdist.program import NodeOutIdx, OutIdx, PrimalIdx, Program, Row


def replay(
    base: torch.Tensor, steps: Sequence[Step], values: Sequence[Any], made: dict[int, Any]
) -> torch.Tensor:
    """Make the view of `base` that `steps` describe.

    Args:
        base: what to view.
        steps: how.
        values: what the region returned.
        made: by serial, what several views have in common: a tensor that is no view itself, or all the
            results of one operation.
    """
    start = first_to_make(steps, made)
    if start:
        base = _made_by(steps[start - 1], made)
    for step in steps[start:]:
        if isinstance(step, FunctionView):
            base = function_view(base, values[step.value], viewer(step), step.creation)
            continue
        with torch.set_grad_enabled(step.grad):
            result = step.op(base, *step.args, **dict(step.kwargs))
        if step.is_common():
            made[step.serial] = result
        base = _picked(result, step)
    return base


def viewer(step: FunctionView) -> Callable[[torch.Tensor], torch.Tensor]:
    """What makes the views inside of a user's autograd function."""
    return lambda base: replay(base, step.steps, (), {})


def first_to_make(steps: Sequence[Step], made: Container[int]) -> int:
    """The first step to take: behind the last one that is made already."""
    return max((at + 1 for at, step in enumerate(steps) if is_made(step, made)), default=0)


def is_made(step: Step, made: Container[int]) -> bool:
    """Whether what a step makes is there, because another view has that step too."""
    return isinstance(step, ViewStep) and step.is_common() and step.serial in made


def _made_by(step: Step, made: Mapping[int, Any]) -> torch.Tensor:
    assert isinstance(step, ViewStep), "a function's views are made by themselves"
    return _picked(made[step.serial], step)


def _picked(result: Any, step: ViewStep) -> torch.Tensor:
    return result if step.pick is None else result[step.pick]


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
            outs = Outputs(self, primals, call(primals))
            for idx in self.order:
                outs.make(idx)
            return outs.in_order()

        return lifted


class Outputs:
    """The outputs of one call, made one by one, each once.

    Args:
        plan: what each is.
        primals: inputs.
        values: what the region returns; read when an output is made.
    """

    def __init__(self, plan: EpiloguePlan, primals: Sequence[Any], values: Sequence[Any]) -> None:
        self._plan, self._primals, self._values = plan, primals, values
        self._built: dict[OutIdx, Any] = {}
        self._made: dict[int, Any] = {}

    def in_order(self) -> list[Any]:
        """All of them, as the program returns them."""
        return [self.make(idx) for idx in self._plan.outputs.indices()]

    def make(self, idx: OutIdx) -> Any:
        """One of them, and first what it is made of."""
        if idx not in self._built:
            self._built[idx] = self._new(self._plan.outputs[idx])
        return self._built[idx]

    def _new(self, fact: OutputFact) -> Any:
        match fact:
            case NotATensor(value=value):
                return value
            case Fresh(value=value):
                return self._values[value]
            case IsInput(input=source):
                return self._primals[source]
            case ViewOfInput(base=base, steps=steps):
                return replay(self._primals[base], steps, self._values, self._made)
            case ViewOfIntermediate(base=base, steps=steps):
                return replay(self._values[base], steps, self._values, self._made)
            case ViewOfOutput(base=base, steps=steps):
                return replay(self.make(base), steps, self._values, self._made)
            case _:
                assert_never(fact)


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
