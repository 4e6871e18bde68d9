"""Symbolic sizes: one artifact serves calls of many sizes, and each is what eager would have done."""

import re
from dataclasses import replace

from hypothesis import HealthCheck, assume, event, given, settings

from aotdist.errors import UnsupportedProgram
from tests.semantics.observation import same_as_eager
from tests.semantics.programs import Program, programs
from tests.semantics.vocabulary import INPUTS

SIZED = [text for text in INPUTS.values() if "arange" not in text]
search = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], max_examples=100)


def resized(program: Program) -> Program:
    """The same program, given tensors of five rows where it had three."""
    return replace(program, inputs=tuple(re.sub(r"\b3\b", "5", text) for text in program.inputs))


def runs_in_eager(program: Program) -> bool:
    try:
        return program.runs_in_eager()
    except IndexError:
        return False


@search
@given(programs(inputs=SIZED))
def test_generated_programs(program):
    other = resized(program)
    assume(runs_in_eager(program))
    sizes = [program, other, program] if runs_in_eager(other) else [program]
    event(f"{len(sizes)} sizes")
    fn = program.load()

    def scenes():
        return [scene for given_ in sizes for scene in given_.scenes(fn)[:1]]

    try:
        compiled = same_as_eager(scenes, seed=1, dynamic=True, compilations=None)
    except UnsupportedProgram as refusal:
        event(f"refused: {refusal.what}")
    else:
        event(f"{len(compiled.artifacts)} artifacts for {len(sizes)} sizes")
