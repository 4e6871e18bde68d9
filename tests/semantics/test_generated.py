"""Random programs: the compiled call and eager cannot be told apart."""

import pytest
import torch
from hypothesis import given

from tests.semantics.programs import programs
from tests.semantics.searching import EVERYTHING, compare, search, timeout, words
from tests.semantics.vocabulary import (
    ARITHMETIC,
    COMPLEX,
    COMPLEX_VIEWS,
    COMPLEX_WRITES,
    MOVES,
    RESHAPES,
    SQUARE_COMPLEX,
    SQUARE_WRAPPERS,
    VIEWS,
    WRAPPERS,
    WRITES,
)

pytestmark = timeout


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
@given(programs(words(inputs=WRAPPERS, squares=SQUARE_WRAPPERS, share_memory=True)))
def test_wrappers(program):
    compare(program, mixes=True)


@search
@given(
    programs(
        words(inputs=WRAPPERS, squares=SQUARE_WRAPPERS, share_memory=True, leave_out=True, other_kinds=True)
    )
)
def test_gradients_of_other_kinds(program):
    compare(program, mixes=True)


@search
@given(
    programs(
        words(
            inputs=COMPLEX,
            squares=SQUARE_COMPLEX,
            values=(ARITHMETIC, VIEWS, COMPLEX_VIEWS),
            writes=(*WRITES, *COMPLEX_WRITES),
        )
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
