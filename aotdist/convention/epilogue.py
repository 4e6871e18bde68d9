"""Outputs that are inputs, or views of something, are rebuilt outside of the compiled region.

The region returns bases. The operations that made the views are replayed on them, so `_base`, shared storage,
`grad_fn` and later writes through the views are as in eager. In-place changes of sizes, strides, storages and
history are replayed in program order with the views, each of which is made of its base as it was then.
Source: "Add an opaque epilogue in AOTAutograd for aliasing/mutations" (pytorch#85036).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

import torch

from aotdist.aliasing.overwrite import put, rewind
from aotdist.facts import (
    Action,
    Facts,
    Fresh,
    FunctionView,
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
)
from aotdist.program import Call, OutIdx, PrimalIdx, Row
from aotdist.subclasses.protocol import plain_tensors
from aotdist.torch_seam.autograd import history_of, set_creation_meta


def replay(
    base: torch.Tensor, steps: Sequence[Step], values: Sequence[Any], made: dict[int, Any]
) -> torch.Tensor:
    """Make the view of `base` that `steps` describe.

    Args:
        base: what to view.
        steps: the operations that make the view.
        values: what the region returned.
        made: by serial, results that several views share: a tensor that is no view itself, or all the results
            of one operation.
    """
    start = first_to_make(steps, made)
    if start:
        base = _picked(made[steps[start - 1].serial], steps[start - 1])
    for step in steps[start:]:
        if isinstance(step, FunctionView):
            result = function_view(base, values[step.value], viewer(step), step.creation)
        else:
            result = step.of(base)
        if step.is_common():
            made[step.serial] = result
        base = _picked(result, step)
    return base


def viewer(step: FunctionView) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The function that makes a view from inside of a user's autograd function; None for the base itself."""
    if not step.steps:
        return None
    return lambda base: replay(base, step.steps, (), {})


def first_to_make(steps: Sequence[Step], made: Container[int]) -> int:
    """The position of the first step whose result is not there yet; views may share steps."""
    shared = (at + 1 for at, step in enumerate(steps) if step.is_common() and step.serial in made)
    return max(shared, default=0)


def _picked(result: Any, step: Step) -> torch.Tensor:
    return result if isinstance(step, FunctionView) or step.pick is None else result[step.pick]


@dataclass(frozen=True, slots=True)
class EpiloguePlan:
    """How each output is made of inputs and of the values that the region returns.

    Args:
        outputs: the fact of each output.
        order: the order in which to make them, and to write metadata.
        rewinds: inputs whose version counters are decreased first, by the number of writes that are repeated.
        switched_on: inputs that begin to require grad, before the region runs: its node has their gradients.
    """

    outputs: Row[OutIdx, OutputFact]
    order: tuple[Action, ...]
    rewinds: tuple[tuple[PrimalIdx, int], ...] = ()
    switched_on: tuple[PrimalIdx, ...] = ()

    def lift(self, call: Call) -> Call:
        """Rebuild the outputs from the region's values."""

        def lifted(primals: Sequence[Any]) -> list[Any]:
            outs = Outputs(self, primals)
            outs.values = call(primals)
            self.count(primals)
            for action in self.order:
                outs.do(action)
            return outs.in_order()

        return lifted

    def count(self, primals: Sequence[Any]) -> None:
        """Correct version counters after the region has run."""
        for idx, count in self.rewinds:
            rewind(primals[idx], count)


class Outputs:
    """The outputs of one call, made one by one, each once.

    Args:
        plan: how each is made.
        primals: inputs, before the region runs.
    """

    def __init__(self, plan: EpiloguePlan, primals: Sequence[Any]) -> None:
        self._plan, self._primals = plan, primals
        self.values: Sequence[Any] = ()
        """The values that the region returned."""
        self._built: dict[OutIdx, Any] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._made: dict[int, Any] = {}
        for source in plan.switched_on:
            primals[source].requires_grad_()

    def in_order(self) -> list[Any]:
        """All of them, as the program returns them."""
        return [self.make(idx) for idx in self._plan.outputs.indices()]

    def do(self, action: Action) -> None:
        """Make an output, keep a tensor for later, or write metadata."""
        match action:
            case MetadataWrite():
                args = [self._at(arg) if isinstance(arg, Place) else arg for arg in action.args]
                data = None if action.data is None else self.values[action.data]
                rewrite(self._at(action.target), action, args, data)
            case Keep(number=number, place=place):
                self._kept[number] = self._at(place)
            case _:
                self.make(action)

    def make(self, idx: OutIdx) -> Any:
        """One output; outputs that it is a view of are made first."""
        if idx not in self._built:
            fact = self._plan.outputs[idx]
            self._built[idx] = fact.value if isinstance(fact, NotATensor) else self._at(fact)
        return self._built[idx]

    def _at(self, place: Place) -> torch.Tensor:
        match place:
            case Fresh(value=value):
                return self.values[value]
            case IsInput(input=source):
                return self._primals[source]
            case ViewOfInput(base=base, steps=steps):
                return replay(self._primals[base], steps, self.values, self._made)
            case ViewOfIntermediate(base=base, steps=steps):
                return replay(self.values[base], steps, self.values, self._made)
            case ViewOfOutput(base=base, steps=steps):
                return replay(self.make(base), steps, self.values, self._made)
            case Kept(number=number):
                return self._kept[number]
            case _:
                assert_never(place)


def rewrite(
    tensor: torch.Tensor, write: MetadataWrite, args: Sequence[Any], data: torch.Tensor | None = None
) -> None:
    """Repeat one write of metadata on `tensor`, with `args` in the place of the write's own.

    Args:
        tensor: the caller's.
        write: the write.
        args: its arguments, tensors of the trace replaced by those of the call.
        data: what the tensor's plain tensors are to hold afterwards; None to leave them as they are.
    """
    history_of(tensor)  # autograd rebuilds the history of a view whose base was written when it is read
    with torch.set_grad_enabled(write.grad):
        write.op(tensor, *args, **dict(write.kwargs))
    if data is not None:
        for plain, value in zip(plain_tensors(tensor), plain_tensors(data), strict=True):
            plain.data.copy_(value)


def plan_epilogue(facts: Facts) -> EpiloguePlan:
    """How a call's outputs are made from what the region returns."""
    return EpiloguePlan(facts.outputs, facts.order, facts.rewinds, facts.switched_on)


# Views that a user's autograd function returns: of the same base as in eager, with the function's backward.
#
# Replaying the views would lose the backward, and the region's value does not share the memory of the base.
# So the view is made again inside of an autograd function of our own, which sends the gradient to the value
# of the region; to autograd it is then a view made by an autograd function, as in eager.


class _FunctionView(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, base: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)  # the region gets no zeros for gradients that do not arrive
        return make(base)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


def function_view(
    base: torch.Tensor,
    value: torch.Tensor,
    make: Callable[[torch.Tensor], torch.Tensor] | None,
    creation: Any,
) -> torch.Tensor:
    """The view that `make` makes of `base`, with the history of `value`.

    Args:
        base: the tensor whose memory it shows.
        value: the region's result, which has the view's numbers and its history.
        make: makes the view; None where `base`, a written tensor from inside of a wrapper, is the view.
        creation: autograd's `CreationMeta` for the view.
    """
    if make is None:
        put(base, value, 0)
        return base
    with torch.enable_grad():  # as it was where the user's function ran
        view = _FunctionView.apply(value, base, make)
    set_creation_meta(view, creation)
    return view
