"""Random programs, cut by each partition: the compiled call and eager cannot be told apart."""

from contextlib import nullcontext
from typing import Any

import functorch.compile as theirs
import pytest
from hypothesis import HealthCheck, assume, event, given, settings

import aotdist.functorch as ours
from aotdist.codegen.backend import CallableBackend
from aotdist.errors import UnsupportedProgram
from aotdist.passes.run import PASS_NAMES
from tests.semantics.observation import same_as_eager
from tests.semantics.programs import Program, programs
from tests.semantics.searching import REFUSALS, SWEEP

AS_IT_IS = {"disabled_passes": frozenset(PASS_NAMES)}
search = settings(
    # The same programs every time: tests/semantics searches for new ones.
    derandomize=True,
    max_examples=60 if SWEEP else 4 * settings().max_examples,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def compare(program: Program, partition_fn: Any, **options: Any) -> None:
    assume(program.runs_in_eager(nullcontext))
    # What `nop` returns takes any strides; a copy of a tangent would be summed in another order.
    backend = ours.FunctorchBackend(CallableBackend(ours.nop), partition_fn, any_tangents=True)
    try:
        same_as_eager(program.scenes, seed=1, backend=backend, **options)
    except UnsupportedProgram as refusal:
        event(f"refused: {refusal.what}")
        assert any(reason in refusal.what for reason in REFUSALS), refusal


def draws(program: Program) -> bool:
    return "rand_like" in program.source() or "dropout" in program.source()


@pytest.mark.parametrize("options", [AS_IT_IS, {}], ids=["as it is cut", "with graph passes after it"])
@pytest.mark.parametrize("partition", [ours.default_partition, ours.min_cut_rematerialization_partition])
@search
@given(program=programs())
def test_our_partitions(program: Program, partition: Any, options: dict[str, Any]):
    compare(program, partition, **options)


@pytest.mark.parametrize("partition", [theirs.default_partition, theirs.min_cut_rematerialization_partition])
@search
@given(program=programs())
def test_their_partitions(program: Program, partition: Any):
    """Theirs drop random numbers that nobody uses, which eager draws."""
    assume(not draws(program))
    compare(program, partition, **AS_IT_IS)
