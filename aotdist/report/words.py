"""Facts in words: what happens to each input, and what each output is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, assert_never

from aotdist.capture.captured import Returned
from aotdist.facts import (
    DataWritten,
    Facts,
    Fresh,
    FunctionView,
    InputFact,
    IsInput,
    NotATensor,
    OutputFact,
    Step,
    Untouched,
    ViewOfInput,
    ViewOfIntermediate,
    ViewOfOutput,
)
from aotdist.program import OutIdx, PrimalIdx, Role, Row, Slot

_PLAIN_VALUES = (bool, int, float, str, type(None))
"""Types of values whose text is worth showing."""

_ARGUMENTS: dict[Role, str] = {
    "primal": "input `{}`",
    "size": "size `{}`",
    "saved": "saved `{}`",
    "tangent": "gradient of `{}`, from outside",
    "total": "whole gradient of `{}`, as it goes on",
    "buffer": "`{}` as the backward finds it",
    "rng": "`{}` of the random numbers",
}
_RESULTS: dict[Role, str] = {
    "output": "output `{}`",
    "write": "new value of `{}`",
    "total": "whole gradient of `{}`",
    "grad": "gradient of `{}`",
    "piece": "summand of the gradient of `{}`",
    "backward_write": "new value of `{}`, written in backward",
    "kept": "tensor {} of those that the backward keeps",
    "saved": "saved for the backward",
}


def argument(slot: Slot) -> str:
    """What an argument of a graph is."""
    return _ARGUMENTS.get(slot.role, "{}").format(slot)


def result(slot: Slot) -> str:
    """What a result of a graph is."""
    return _RESULTS.get(slot.role, "{}").format(slot)


def of_input(facts: Facts, idx: PrimalIdx) -> Iterator[str]:
    """What happens to an input, one sentence each; none if it is only read."""
    yield from _data(facts.inputs[idx])
    if idx in facts.backward.writes:
        yield "written in backward, copied back after the graph"
    repeated = [write for write in facts.metadata_writes() if write.target == IsInput(idx)]
    yield from (f"`{_operator(write.op)}` is repeated on it" for write in repeated)
    if idx in facts.switched_on:
        yield "requires grad from then on"
    if facts.backward.grads[idx] is not None:
        yield "gets a gradient"


def _data(fact: InputFact) -> Iterator[str]:
    match fact:
        case DataWritten(differentiable=True):
            yield "written in forward, copied back outside of the graph, where its gradient passes"
        case DataWritten(bumps=0):
            yield "written in forward, copied back after the graph, and its version counter stays"
        case DataWritten():
            yield "written in forward, copied back after the graph"
        case Untouched(bumps=0):
            pass
        case Untouched():
            yield "not written, but its version counter goes up"
        case _:
            assert_never(fact)


def output_names(returned: Returned, count: int) -> list[str]:
    """What the caller calls each output: what is returned, then what is assigned."""
    names = [f"out[{position}]" for position in range(returned.spec.num_leaves)]
    for source, spec in returned.assigned():
        leaves = spec.num_leaves
        names += [source.path] if leaves == 1 else [f"{source.path}[{leaf}]" for leaf in range(leaves)]
    names += [path[1:] for _, path in returned.replaced]
    return [*names, *(f"out[{position}]" for position in range(len(names), count))]


def of_output(
    fact: OutputFact,
    ins: Row[PrimalIdx, Slot],
    outs: Callable[[OutIdx], str],
    *,
    differentiable: bool,
) -> Iterator[str]:
    """What an output is, one sentence each.

    Args:
        fact: what the trace showed.
        ins: names of the inputs.
        outs: names an output.
        differentiable: whether a gradient can come back for it.
    """
    match fact:
        case NotATensor(value=value):
            shown = repr(value) if isinstance(value, _PLAIN_VALUES) else f"a {type(value).__name__}"
            yield f"the same at every call: {shown}"
        case Fresh():
            yield "a tensor of its own"
        case IsInput(input=idx):
            yield f"is `{ins[idx]}`, the same object"
        case ViewOfInput(base=idx, steps=steps):
            yield f"a view of `{ins[idx]}`, made again outside: {_views(steps)}"
        case ViewOfIntermediate(steps=steps):
            yield f"a view of a tensor that is not returned, made again outside: {_views(steps)}"
        case ViewOfOutput(base=out, steps=()):
            yield f"is `{outs(out)}`, the same object"
        case ViewOfOutput(base=out, steps=steps):
            yield f"a view of `{outs(out)}`, made again outside: {_views(steps)}"
        case _:
            assert_never(fact)
    if differentiable:
        yield "takes a gradient"


def _views(steps: Sequence[Step]) -> str:
    return ", ".join(_view(step) for step in steps)


def _view(step: Step) -> str:
    if isinstance(step, FunctionView):
        return "an autograd function"
    return _operator(step.op) if step.pick is None else f"{_operator(step.op)}[{step.pick}]"


def _operator(op: Any) -> str:
    """`aten.t_.default` is `t_`; a function, or what else is called, has a name or a text."""
    text = str(op)
    if text.startswith("aten."):
        return text.split(".")[1]
    return getattr(op, "__name__", text)
