"""Random programs: the compiled call and eager cannot be told apart."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings

from aotdist.errors import UnsupportedProgram
from tests.semantics.observation import Around, same_as_eager
from tests.semantics.programs import MOVES, RESHAPES, WRITES, Program, programs

REFUSALS = (
    "writes through an expanded tensor",
    "reads a tensor's data",
    "is written and shares memory with",
    "size, strides or storage written in place",
    "whose size grew in place, or whose storage was replaced, after the view",
    "a tensor is resized in place, and",
    "a tensor with history has its sizes written in place under `no_grad`",
)
"""What a random program may be refused for."""

SWEEP = settings().max_examples >= 1000
"""Whether the long search was asked for."""

search = settings(
    # Eight searches: 2,000 programs in an ordinary run, 100,000 in a sweep.
    max_examples=12_500 if SWEEP else 250,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
pytestmark = pytest.mark.timeout(7200 if SWEEP else 120)


def compare(program: Program, around: Around = nullcontext, **options) -> None:
    assume(program.runs_in_eager(around))
    try:
        same_as_eager(program.scenes, around=around, seed=1, **options)
    except UnsupportedProgram as refusal:
        event(f"refused: {refusal.what}")
        assert any(reason in refusal.what for reason in REFUSALS), refusal


@search
@given(programs())
def test_with_gradients(program):
    compare(program)


@search
@given(programs())
def test_under_no_grad(program):
    compare(program, torch.no_grad)


@search
@given(programs(share_memory=True))
def test_inputs_that_share_memory(program):
    compare(program)


@search
@given(programs(share_memory=True))
def test_inputs_that_share_memory_under_no_grad(program):
    compare(program, torch.no_grad)


@search
@given(programs(modes=("",)))
def test_in_inference_mode(program):
    compare(program, torch.inference_mode)


@search
@given(programs(writes=(*WRITES, *RESHAPES)))
def test_with_writes_of_metadata(program):
    compare(program)


@search
@given(programs(writes=(*WRITES, *RESHAPES, *MOVES)))
def test_with_writes_of_storage(program):
    compare(program)


@search
@given(programs())
def test_without_graph_passes(program):
    """The passes change nothing: what they leave is what the trace recorded."""
    compare(program, disabled_passes=frozenset({"cleanup"}))


@search
@given(programs())
def test_with_the_fewest_bytes_saved(program):
    compare(program, partition="min_cut")


@pytest.mark.sweep
@search
@given(programs(max_statements=20))
def test_long_programs(program):
    compare(program)
