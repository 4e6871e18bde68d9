"""Random programs through `torch.compile`: where Dynamo itself is right, nobody can tell them from eager."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from torch._dynamo.exc import BackendCompilerFailed

from aotdist.errors import UnsupportedProgram
from tests.dynamo.comparison import compiled, played
from tests.semantics.observation import Sight, differences, nullcontext
from tests.semantics.programs import Program, programs
from tests.semantics.searching import EVERYTHING, REFUSALS, SWEEP, timeout, words

pytestmark = [timeout, pytest.mark.filterwarnings("ignore")]
search = settings(
    # Dynamo takes a tenth of a second for a program, and makes each of them three times.
    max_examples=400 if SWEEP else 6,
    derandomize=not SWEEP,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def by_dynamo_alone(program: Program, dynamic: bool | None) -> list[Sight] | None:
    """What the user sees with Dynamo and no compiler behind it; None if it does not get through."""
    try:
        return played(program.scenes, lambda target: torch.compile(target, backend="eager", dynamic=dynamic))
    except Exception as error:
        event(f"Dynamo does not do it: {type(error).__name__}")
        return None


def compare(program: Program, dynamic: bool | None = None) -> None:
    assume(program.runs_in_eager(nullcontext))
    eager = played(program.scenes, lambda target: target)
    theirs = by_dynamo_alone(program, dynamic)
    assume(theirs is not None and not differences(eager, theirs))
    try:
        ours = played(program.scenes, lambda target: compiled(target, dynamic=dynamic))
    except BackendCompilerFailed as failure:
        refusal = failure.inner_exception
        event(f"refused: {refusal}")
        assert isinstance(refusal, UnsupportedProgram), program.source()
        assert any(reason in refusal.what for reason in REFUSALS), program.source()
    except Exception as error:
        error.add_note(program.source())
        raise
    else:
        assert not differences(eager, ours), f"{program.source()}\n{differences(eager, ours)}"


@search
@given(programs(EVERYTHING))
def test_with_gradients(program: Program):
    compare(program)


@search
@given(programs(words(share_memory=True, other_layouts=True)))
def test_inputs_that_share_memory(program: Program):
    compare(program)


@pytest.mark.sweep
@search
@given(programs(EVERYTHING))
def test_open_sizes(program: Program):
    compare(program, dynamic=True)
