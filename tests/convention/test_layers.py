"""The law of each layer, alone: `plan.lift(inner.fn)` behaves as `program.fn`, in results and in writes.

Nothing is compiled: programs run eagerly, and the facts come from one trace of the same program.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings

from aotdist.convention import bases as synthetic_base
from aotdist.convention import dedupe
from aotdist.convention.bases import NO_BASES, BasePlan
from aotdist.convention.needed_bases import Writes, plan_bases
from aotdist.convention.stack import Plans
from aotdist.errors import UnsupportedProgram
from aotdist.facts import Facts
from aotdist.program import Call, Program
from aotdist.subclasses.protocol import plain_tensors
from tests.convention.lowering import (
    OUTSIDE,
    Lower,
    Plan,
    call_of,
    facts_of,
    lower_plain,
    lower_unwrap,
    program_of,
)
from tests.semantics.functions import Transposed
from tests.semantics.observation import Scene, assert_same, play
from tests.semantics.programs import Program as GeneratedProgram
from tests.semantics.programs import programs
from tests.semantics.vocabulary import (
    ARITHMETIC,
    FUNCTION_CALLS,
    INPUTS,
    SEVERAL_VIEWS,
    VIEWS,
    WRAPPERS,
    WRITES,
)

search = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
Arguments = Callable[[], Sequence[torch.Tensor]]
DISTINCT = tuple(INPUTS.values())
COUNTED = tuple(write for write in WRITES if "foreach" not in write)
"""Writes that autograd counts under a dispatch mode too; programs run eagerly under one here."""


def behaves_as(lifted: Call, original: Call, arguments: Arguments, *, backward: bool) -> None:
    """Both calls, each on arguments of its own, look the same to whoever holds the arguments."""
    sights = []
    for call in (original, lifted):
        torch.manual_seed(0)
        scene = Scene(call, tuple(arguments()))
        torch.manual_seed(1)
        seen = play(scene, lambda *args, call=call: call(list(args)), backward=backward)
        sights.append(seen)
    assert_same(*sights)


def laws_hold(fn: Callable[..., Any], arguments: Arguments, *, training: bool = True) -> None:
    """The law of every layer, alone and in every stack of neighbours; then that of all together."""
    torch.manual_seed(0)
    program = program_of(fn, arguments())
    facts = facts_of(program, training=training)

    def plains() -> list[torch.Tensor]:
        return [plain.detach() for tensor in arguments() for plain in plain_tensors(tensor)]

    def detached() -> list[torch.Tensor]:
        return [tensor.detach() for tensor in arguments()]

    with torch.set_grad_enabled(training):
        outside = _lowered(OUTSIDE, program, facts)
        stacks_hold(outside, lambda level: arguments, backward=training)
    with torch.no_grad():  # as inside of the autograd node
        inside = _lowered((lower_unwrap, lower_plain(program)), outside[-1][0], facts)
        stacks_hold(inside, lambda level: plains if level else detached, backward=False)
        leaves_arguments_alone(call_of(inside[-1][0]), plains)
        plans = Plans.of(program, facts)
        lifted = plans.lift_outside(plans.inside.lift(call_of(inside[-1][0])))
        if not facts.metadata_writes():  # of a detached tensor, `detach_` is another thing
            behaves_as(lifted, call_of(program), detached, backward=False)


_Levels = list[tuple[Program[Any], Plan | None]]
"""A program, then each layer's inner one with the plan that leads back from it."""


def _lowered(layers: Sequence[Lower], program: Program[Any], facts: Facts) -> _Levels:
    levels: _Levels = [(program, None)]
    for layer in layers:
        levels.append(layer(levels[-1][0], facts))
    return levels


def stacks_hold(levels: _Levels, arguments: Callable[[int], Arguments], *, backward: bool) -> None:
    """Each stack of neighbouring layers leads back from its innermost program to its outermost."""
    for outer, inner in itertools.combinations(range(len(levels)), 2):
        lifted = call_of(levels[inner][0])
        for _, plan in reversed(levels[outer + 1 : inner + 1]):
            assert plan is not None
            lifted = plan.lift(lifted)
        behaves_as(lifted, call_of(levels[outer][0]), arguments(outer), backward=backward)


def leaves_arguments_alone(call: Call, arguments: Arguments) -> None:
    """What the innermost program is: it writes nothing that it is given."""
    torch.manual_seed(0)
    given_to_it = list(arguments())
    before = [tensor.clone() for tensor in given_to_it]
    call(given_to_it)
    torch.testing.assert_close(given_to_it, before, rtol=0, atol=0, equal_nan=True)


def generated_laws_hold(program: GeneratedProgram, *, training: bool = True) -> None:
    around = nullcontext if training else torch.no_grad
    # Layers hand on clones of what is written, which have no gaps: there `contiguous` makes no new tensor.
    assume(not any(".contiguous()" in statement for statement in program.statements))
    assume(program.runs_in_eager(around, backward=training))
    try:
        laws_hold(program.load(), lambda: list(program.arguments().values()), training=training)
    except UnsupportedProgram as refusal:
        event(f"refused: {refusal.what}")
    except RuntimeError as error:
        # What eager hands out detached, an inner program hands out with its history, to be detached outside.
        assume("modified by an inplace operation" not in str(error))
        raise


@search
@given(programs(inputs=DISTINCT, repeat_inputs=False, writes=COUNTED))
def test_generated_programs(program):
    generated_laws_hold(program)


@search
@given(programs(inputs=DISTINCT, repeat_inputs=False, writes=COUNTED, modes=("",)))
def test_generated_programs_without_gradients(program):
    generated_laws_hold(program, training=False)


@search
@given(programs(inputs=WRAPPERS, repeat_inputs=False, writes=COUNTED))
def test_generated_programs_of_wrappers(program):
    generated_laws_hold(program)


@search
@given(
    programs(
        inputs=DISTINCT,
        repeat_inputs=False,
        writes=COUNTED,
        values=(ARITHMETIC, VIEWS, FUNCTION_CALLS),
        several=SEVERAL_VIEWS,
        modes=("",),
    )
)
def test_generated_programs_with_functions(program):
    """Under `no_grad` what a function returns is another thing if its argument requires no grad."""
    generated_laws_hold(program)


@search
@given(programs(share_memory=True))
def test_inputs_that_share_memory(program):
    """Bases are made of the inputs alone, beneath `dedupe`; the program behaves as before."""
    assume(program.runs_in_eager())

    def arguments() -> list[torch.Tensor]:
        return list(program.arguments().values())

    original = program_of(program.load(), arguments())
    distinct, deduped = dedupe.lower(original)
    bases = bases_or_none(distinct)
    assume(bases is not None)
    assert bases is not None
    event(f"{len(bases.bases)} bases")
    inner = synthetic_base.lower(distinct, bases)
    behaves_as(bases.lift(call_of(inner)), call_of(distinct), lambda: deduped_of(arguments()), backward=True)
    behaves_as(deduped.lift(bases.lift(call_of(inner))), call_of(original), arguments, backward=True)


def bases_or_none(distinct: Program[Any]) -> BasePlan | None:
    try:
        return plan_bases(distinct, Writes().and_of(distinct, facts_of(distinct), NO_BASES))
    except UnsupportedProgram as refusal:
        event(f"refused: {refusal.what}")
        return None


def deduped_of(arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in arguments}.values())


@search
@given(programs())
def test_repeated_arguments(program):
    """Dedupe needs no facts: its law holds for every program."""
    assume(program.runs_in_eager())

    def arguments() -> list[torch.Tensor]:
        return list(program.arguments().values())

    original = program_of(program.load(), arguments())
    inner, plan = dedupe.lower(original)
    assert len({id(example) for example in inner.examples}) == len(inner.examples)
    behaves_as(plan.lift(call_of(inner)), call_of(original), arguments, backward=True)


PROGRAMS = {
    "a view by a function": lambda x: [Transposed.apply(x)],
    "a view of a view by a function": lambda x: [Transposed.apply(x)[1:]],
    "an input": lambda x: [x, x],
    "a view of an input": lambda x: [x.t(), x.t()[0], x],
    "views of an intermediate": lambda x: [(y := x * 2).t(), y[0]],
    "a view and its base": lambda x: [(y := x * 2)[0], y],
    "a view of a view that is returned": lambda x: [(v := (x * 2).t()), v[0], v[0]],
    "several results of one view": lambda x: [*(x * 2).split(2, 1), *x.unbind(0)],
    "a view without gradient": lambda x: [x.detach(), (x * 2).detach()],
    "a write": lambda x: [x.add_(1)],
    "a write through a view": lambda x: [x.t()[0].mul_(2)],
    "a write without gradient": lambda x: [x.detach().mul_(2), x.sum()],
    "a write, then a view": lambda x: [x.mul_(2), x.t(), x.detach()],
    "nothing": lambda x: [],
    "constants": lambda x: [1, None, x * 2, "text"],
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_kind_of_output_and_write(name, training):
    laws_hold(PROGRAMS[name], lambda: [torch.randn(3, 4, requires_grad=True) * 1.0], training=training)
