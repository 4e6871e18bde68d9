"""Prints what is done with the values that the node returns: write inputs, make outputs, return them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, assert_never

import torch

from aotdist.aliasing.overwrite import put
from aotdist.capture.ambient import Ambient
from aotdist.capture.captured import Returned
from aotdist.capture.effects import (
    Assign,
    Check,
    Delete,
    EffectLog,
    Print,
    TensorResult,
    require,
)
from aotdist.capture.instances import MadeObject
from aotdist.convention.epilogue import EpiloguePlan, first_to_make, function_view, rewrite, viewer
from aotdist.facts import (
    Action,
    Fresh,
    FunctionView,
    Inside,
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
from aotdist.partition.gates import Gate
from aotdist.program import NodeOutIdx, OutIdx, PrimalIdx, Row
from aotdist.runtime.hooks import HookPlan, make_gate
from aotdist.runtime.printer import (
    Printer,
    print_literal,
    print_tree,
    remark,
    sequence,
)
from aotdist.sizes import concrete, is_symbolic


def print_write(printer: Printer, primals: Sequence[str], write: tuple[PrimalIdx, NodeOutIdx, int]) -> None:
    """Print that an input gets a new value with a history."""
    primal, value, bumps = write
    printer.line(printer.call(put, primals[primal], f"values[{value}]", bumps))


def print_steps(
    printer: Printer, hooks: HookPlan, primals: Sequence[str], do: Callable[[Action], None]
) -> None:
    """Print the steps outside of a node whose results pass gates."""
    printer.line("values = list(values)")
    before = "None"
    for step in hooks.gated:
        match step:
            case Gate():
                places = hooks.places(step)
                points = [f"values[{p.value}]" if isinstance(p, Fresh) else f"o{p}" for p in places]
                lead = printer.bind(f"gate_{step.level}", make_gate(hooks, step))
                printer.line(f"passed_{step.level} = {lead}(values, {sequence(points)}, {before})")
                before = f"passed_{step.level}"
            case tuple():
                print_write(printer, primals, step)
            case _:
                do(step)


def action_printer(
    printer: Printer, epilogue: EpiloguePlan, primals: Sequence[str], modes: Ambient
) -> Callable[[Action], None]:
    """A function that prints one action of the epilogue; it makes each output once.

    Args:
        printer: where to print.
        epilogue: the outputs and actions.
        primals: the variables of the inputs.
        modes: those of the call.
    """
    printed: set[OutIdx] = set()
    made: dict[int, str] = {}  # variables of common view steps, by serial number

    def make(idx: OutIdx) -> None:
        fact = epilogue.outputs[idx]
        if idx in printed or (
            isinstance(fact, NotATensor) and isinstance(fact.value, (Returned, MadeObject))
        ):
            return
        printed.add(idx)
        value = print_literal(printer, fact.value) if isinstance(fact, NotATensor) else at(fact)
        printer.line(f"o{idx} = {value}")

    def at(place: Place) -> str:
        if isinstance(place, ViewOfOutput):
            make(place.base)
        return _at(printer, place, primals, modes, made)

    def do(action: Action) -> None:
        match action:
            case MetadataWrite():
                _print_rewrite(printer, action, at)
            case Keep(number=number, place=place):
                printer.line(f"kept_{number} = {at(place)}")
            case _:
                make(action)

    return do


def _print_rewrite(printer: Printer, change: MetadataWrite, at: Callable[[Place], str]) -> None:
    args = [at(arg) if isinstance(arg, Place) else print_literal(printer, arg) for arg in change.args]
    data = [] if change.data is None else [f"values[{change.data}]"]
    op = printer.bind(str(getattr(change.op, "__name__", change.op)), change)
    op = printer.call(concrete, op, "symbols") if is_symbolic(change.kwargs) else op
    printer.line(printer.call(rewrite, at(change.target), op, sequence(args), *data))


def _at(printer: Printer, place: Place, primals: Sequence[str], modes: Ambient, made: dict[int, str]) -> str:
    """An expression for one tensor; view steps that several tensors share are printed before it, once."""
    match place:
        case Fresh(value=value):
            return f"values[{value}]"
        case IsInput(input=source):
            return primals[source]
        case ViewOfInput(base=base, steps=steps):
            return _view(printer, primals[base], steps, modes, made)
        case ViewOfIntermediate(base=base, steps=steps):
            return _view(printer, f"values[{base}]", steps, modes, made)
        case ViewOfOutput(base=base, steps=steps):
            return _view(printer, f"o{base}", steps, modes, made)
        case Kept(number=number):
            return f"kept_{number}"
        case _:
            assert_never(place)


def _view(printer: Printer, base: str, steps: Sequence[Step], modes: Ambient, made: dict[int, str]) -> str:
    start = first_to_make(steps, made)
    for position, step in enumerate(steps[max(start - 1, 0) :], max(start - 1, 0)):
        if position + 1 == start:
            base = _picked(made[step.serial], step)
            continue
        result = _made(printer, base, step, modes)
        picks = isinstance(step, ViewStep) and step.pick is not None
        if picks or (step.is_common() and position + 1 < len(steps)):
            name = f"{'parts' if picks else 'base'}_{len(made)}"
            printer.line(f"{name} = {result}")
            result = made[step.serial] = name
        base = _picked(result, step)
    return base


def _made(printer: Printer, base: str, step: Step, modes: Ambient) -> str:
    if isinstance(step, FunctionView):
        make = printer.call(viewer, printer.concrete("views", step))
        creation = printer.bind("creation", step.creation)
        return printer.call(function_view, base, f"values[{step.value}]", make, creation)
    if isinstance(step.op, Inside):
        return f"{base}{step.op.path}"
    op = printer.concrete(_name_of(step.op), step.op)
    more = [print_literal(printer, value) for value in step.args]
    more += [f"{name}={print_literal(printer, value)}" for name, value in step.kwargs]
    if step.grad == modes.grad:
        return f"{op}({', '.join([base, *more])})"
    return printer.call(_in_grad_mode, step.grad, op, base, *more)


def _picked(result: str, step: Step) -> str:
    return result if isinstance(step, FunctionView) or step.pick is None else f"{result}[{step.pick}]"


def _name_of(op: Callable[..., Any]) -> str:
    return op.__name__ if isinstance(op, FunctionType) else str(op)


def _in_grad_mode(grad: bool, view: Callable[..., Any], base: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.set_grad_enabled(grad):
        return view(base, *args, **kwargs)


def print_return(
    printer: Printer,
    returned: Returned,
    outputs: Row[OutIdx, OutputFact],
    bind: Callable[[str, Any], str],
) -> None:
    """Print the user's result, and the program's effects in Python.

    Args:
        printer: where to print.
        returned: how the result is put together, and the effects.
        outputs: what the outputs are.
        bind: names the root object of a place.
    """
    names = [_name_of_output(idx, fact) for idx, fact in outputs.enumerate()]

    def leaf(value: Any) -> str:
        return names[value.position] if isinstance(value, TensorResult) else print_literal(printer, value)

    for each in returned.log.prints():  # calls of `print` and of loggers
        printed = print_tree(printer, each.given.spec, map(leaf, each.given.leaves))
        printer.line(f"{printer.bind('printed', each.make)}({printed})")
    for check in returned.log.checks():
        (holds,) = map(leaf, check.holds.leaves)
        printer.line(printer.call(require, holds, printer.bind("CHECK", check)))
    result = print_tree(printer, returned.spec, iter(names))
    if returned.shares:  # objects in it may also be assigned to places, so they are made before that
        printer.line(f"result = {result}")
        result = "result"
    _print_changes(printer, returned.log, bind, leaf)
    printer.line(f"return {result}")


def _name_of_output(idx: OutIdx, fact: OutputFact) -> str:
    """The variable of an output; for an object that was printed before, the object's variable."""
    if isinstance(fact, NotATensor) and isinstance(fact.value, MadeObject):
        return f"made_{fact.value.number}"
    return f"o{idx}"


def _print_changes(
    printer: Printer, log: EffectLog, bind: Callable[[str, Any], str], leaf: Callable[[Any], str]
) -> None:
    """Print the other effects; `leaf` gives the expression of a leaf of a value."""
    for each in log.effects:
        match each:
            case Assign(place, tree):
                value = print_tree(printer, tree.spec, map(leaf, tree.leaves))
                if place.is_grown_list:
                    whole = place.whole()
                    printer.line(f"{whole.expression(bind)}.extend({value}){remark(f'{whole.path} grows')}")
                else:
                    printer.line(f"{place.assignment(value, bind)}{remark(f'{place.path} is reassigned')}")
            case Delete(place):
                printer.line(place.deletion(bind))
            case Print() | Check():
                pass
