"""Searches for programs that can be told apart: how many, and how two runs of one are compared."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, event, settings

from aotdist.errors import UnsupportedProgram
from tests.semantics.observation import Around, same_as_eager
from tests.semantics.programs import Program, Vocabulary
from tests.semantics.script import script_of
from tests.semantics.vocabulary import (
    ARITHMETIC,
    FUNCTION_CALLS,
    FUNCTION_WRITES,
    SEVERAL_VIEWS,
    SQUARES,
    VIEWS,
    WRITES,
)

REFUSALS = (
    "into how many parts depends on data",
    "writes through an expanded tensor",
    "reads a tensor's data",
    "size, strides or storage written in place",
    "follows from a tensor that the program made, and then reshaped",
    "that no operator of the program made",
    "a tensor is resized in place, and",
    "the sizes of a tensor with history are changed in place under `no_grad`",
    "writes memory that `as_strided` shows",
    "a tensor inside of it was replaced",
    "a view is used whose base was detached in place",
    "meets memory around it that only `as_strided` shows",
    "or conjugated; it, or another view",
    "whose base was reshaped in place after it was made",
    "itself a view of another tensor, that was made before a write",
    "which gets a gradient, is given another dtype",
    "is a leaf that gives up its gradient in place, and is then written",
    "a tensor is detached in place (`detach_`) that a write of it with history needs",
    "writes a list with wrappers while autograd records",
    "depends on a number, or a size, that is read off a tensor",
    "the shape of the result of",
    "a view of an input, at a place that depends on data, is made before the input is written",
)
"""What a random program may be refused for."""

OF_BACKWARD = (
    "the backward of the program fails, as in eager",
    "the program has no backward, as in eager",
    "gives several DTensors",
)
"""What it may be refused for besides, if eager is not asked for all gradients.

A view made under `no_grad` has none to ask for; its base, which the caller gets with it, has.
"""

WATCHED = (
    "gradients of other kinds than the results arrive",
    "gives several DTensors",
)
"""What it may be refused for besides, if some gradients are of other kinds: hooks look at what passes.

They are where they are asked to be, and where operators take wrappers and plain tensors together.
"""

OF_OWN_LEAVES = (
    "requires grad, and no input of the program that does leads to it",
    "a leaf and a view of another, is written after views of it are made",
)
"""What it may be refused for besides, if it makes leaves of its own: a WithScale is one."""

OF_NUMBERS = ("Inductor does not compile",)
"""What it may be refused for besides, if it reads a number off a tensor and Inductor is to compile it."""

OTHER_NUMBERS = "numbers that depend on data are not as the program was compiled for"
"""What a call may raise instead."""

SWEEP = settings().max_examples >= 1000
"""Whether the long search was asked for."""

search = settings(
    # Twelve searches, 480 programs in an ordinary run and 288 in CI's.
    max_examples=8 * settings().max_examples,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
search_of_classes = settings(search, max_examples=(8 if SWEEP else 2) * settings().max_examples)
"""Six more, 60 programs in an ordinary run."""
timeout = pytest.mark.timeout(7200 if SWEEP else 120)

EVERYTHING = Vocabulary(
    squares=SQUARES,
    values=(ARITHMETIC, VIEWS, FUNCTION_CALLS),
    several=SEVERAL_VIEWS,
    writes=(*WRITES, *FUNCTION_WRITES),
)


def compare(program: Program, around: Around = nullcontext, *, mixes: bool = False, **options) -> None:
    assume(program.runs_in_eager(around))
    compilations = None if program.other_inputs else 1
    try:
        same_as_eager(program.scenes, around=around, seed=1, compilations=compilations, **options)
    except UnsupportedProgram as refusal:
        event(f"refused: {refusal.what}")
        without_grad = around is not nullcontext or any("no_grad" in line for line in program.statements)
        reasons = (*REFUSALS, *OF_BACKWARD) if program.left_out or without_grad else REFUSALS
        reasons = (*reasons, *WATCHED) if program.other_kinds or mixes else reasons
        makes_leaves = any("WithScale(" in line for line in program.statements)
        reasons = (*reasons, *OF_OWN_LEAVES) if makes_leaves else reasons
        reads_numbers = options.get("backend") == "inductor" and ".item()" in "".join(program.statements)
        reasons = (*reasons, *OF_NUMBERS) if reads_numbers else reasons
        known = any(reason in refusal.what for reason in reasons)
        assert known, _explained(program, around, refusal, options)
    except Exception as error:
        if OTHER_NUMBERS in str(error):  # eager expands the one element that there is
            return event("refused at a call")
        error.add_note(_explained(program, around, error, options))
        raise


def _explained(program: Program, around: Around, error: Exception, options: dict) -> str:
    settings = {name: value for name, value in options.items() if name not in ("backend", "rounded")}
    script = script_of(program, around, str(error), settings, options.get("backend", "fx"))
    return f"As a script, with what was seen:\n\n{script}"


def words(**options) -> Vocabulary:
    return replace(EVERYTHING, **options)
