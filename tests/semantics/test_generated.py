"""Random programs: the compiled call and eager cannot be told apart."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings

from aotdist.errors import UnsupportedProgram
from tests.semantics.observation import Around, same_as_eager
from tests.semantics.programs import Program, Vocabulary, programs
from tests.semantics.script import script_of
from tests.semantics.vocabulary import (
    ARITHMETIC,
    COMPLEX,
    COMPLEX_VIEWS,
    COMPLEX_WRITES,
    FUNCTION_CALLS,
    FUNCTION_WRITES,
    MOVES,
    RESHAPES,
    SEVERAL_VIEWS,
    VIEWS,
    WRAPPERS,
    WRITES,
)

REFUSALS = (
    "writes through an expanded tensor",
    "reads a tensor's data",
    "size, strides or storage written in place",
    "whose size grew in place, or whose storage was replaced, after the view",
    "a tensor is resized in place, and",
    "a tensor with history has its sizes written in place under `no_grad`",
    "writes memory that `as_strided` shows",
    "a view is used of a tensor that was detached",
    "shows memory of an input as another dtype than it has",
    "whose base was reshaped in place after it was made",
    "itself a view of another tensor, that was made before a write",
    "which gets a gradient, is given another dtype",
)
"""What a random program may be refused for."""

OF_BACKWARD = (
    "the backward of the program fails, as in eager",
    "the program has no backward, in eager neither",
)
"""What it may be refused for besides, if eager is not asked for all gradients.

A view made under `no_grad` has none to ask for; its base, which the caller gets with it, has.
"""

WATCHED = ("gradients of other kinds than the results arrive",)
"""What it may be refused for besides, if some gradients are of other kinds: hooks look at what passes."""

SWEEP = settings().max_examples >= 1000
"""Whether the long search was asked for."""

search = settings(
    # Twelve searches in an ordinary run, 2,400 programs; thirteen in a sweep, 130,000.
    max_examples=8 * settings().max_examples,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
pytestmark = pytest.mark.timeout(7200 if SWEEP else 120)

EVERYTHING = Vocabulary(
    values=(ARITHMETIC, VIEWS, FUNCTION_CALLS),
    several=SEVERAL_VIEWS,
    writes=(*WRITES, *FUNCTION_WRITES),
)


def compare(program: Program, around: Around = nullcontext, **options) -> None:
    assume(program.runs_in_eager(around))
    compilations = None if program.other_inputs else 1
    try:
        same_as_eager(program.scenes, around=around, seed=1, compilations=compilations, **options)
    except UnsupportedProgram as refusal:
        event(f"refused: {refusal.what}")
        without_grad = around is not nullcontext or any("no_grad" in line for line in program.statements)
        reasons = (*REFUSALS, *OF_BACKWARD) if program.left_out or without_grad else REFUSALS
        reasons = (*reasons, *WATCHED) if program.other_kinds else reasons
        known = any(reason in refusal.what for reason in reasons)
        assert known, _explained(program, around, refusal, options)
    except Exception as error:
        error.add_note(_explained(program, around, error, options))
        raise


def _explained(program: Program, around: Around, error: Exception, options: dict) -> str:
    script = script_of(program, around, str(error), options)
    return f"As a script, with what was seen:\n\n{script}"


def words(**options) -> Vocabulary:
    return replace(EVERYTHING, **options)


@search
@given(programs(EVERYTHING))
def test_with_gradients(program):
    compare(program)


@search
@given(programs(EVERYTHING))
def test_under_no_grad(program):
    compare(program, torch.no_grad)


@search
@given(programs(words(share_memory=True, other_layouts=True)))
def test_inputs_that_share_memory(program):
    compare(program)


@search
@given(programs(words(share_memory=True, other_layouts=True)))
def test_inputs_that_share_memory_under_no_grad(program):
    compare(program, torch.no_grad)


@search
@given(programs(words(modes=("",))))
def test_in_inference_mode(program):
    compare(program, torch.inference_mode)


@search
@given(programs(words(writes=(*WRITES, *RESHAPES))))
def test_with_writes_of_metadata(program):
    compare(program)


@search
@given(programs(words(writes=(*WRITES, *RESHAPES, *MOVES))))
def test_with_writes_of_storage(program):
    compare(program)


@search
@given(programs(words(inputs=WRAPPERS, share_memory=True)))
def test_wrappers(program):
    compare(program)


@search
@given(programs(words(inputs=WRAPPERS, share_memory=True, leave_out=True, other_kinds=True)))
def test_gradients_of_other_kinds(program):
    compare(program)


@search
@given(
    programs(
        words(inputs=COMPLEX, values=(ARITHMETIC, VIEWS, COMPLEX_VIEWS), writes=(*WRITES, *COMPLEX_WRITES))
    )
)
def test_complex_numbers(program):
    compare(program)


@search
@given(programs(EVERYTHING))
def test_without_graph_passes(program):
    """The passes change nothing: what they leave is what the trace recorded."""
    compare(program, disabled_passes=frozenset({"cleanup"}))


@search
@given(programs(words(leave_out=True)))
def test_with_the_fewest_bytes_saved(program):
    """And gradients from some of the results."""
    compare(program, partition="min_cut")


@pytest.mark.sweep
@search
@given(programs(words(max_statements=20)))
def test_long_programs(program):
    compare(program)
