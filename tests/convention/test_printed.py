"""The printed runtime and the composed lifts are the same function."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from torch import nn

import aotdist
from aotdist.api import compiled_call
from aotdist.capture.captured import Returned
from aotdist.errors import UnsupportedProgram
from aotdist.runtime.artifact import Artifact
from aotdist.torch_seam.trees import pytree
from tests.runtime.reference import reference
from tests.semantics.observation import Around, Scene, assert_same, play
from tests.semantics.programs import programs
from tests.semantics.vocabulary import INPUTS, WRAPPERS

search = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def referred(artifact: Artifact) -> Callable[..., Any]:
    """The user's call by way of `reference`: fetch, run the lifts, hand back."""
    fit, returned = artifact.fit, Returned.of(artifact.compilation.traced.facts)
    lifted = reference(artifact)

    def call(*args: Any, **kwargs: Any) -> Any:
        matched = fit.arguments.match(args, kwargs)
        assert matched is not None
        values = iter(lifted([*matched[0], *(source.read() for source in fit.sources)]))
        result = _unflatten(values, returned.spec)
        for place, structure in returned.assigned():
            place.write(_unflatten(values, structure))
        return result

    return call


def _unflatten(values: Any, spec: pytree.TreeSpec) -> Any:
    return pytree.tree_unflatten([next(values) for _ in range(spec.num_leaves)], spec)


def printed(artifact: Artifact) -> Callable[..., Any]:
    return lambda *args, **kwargs: artifact.call(args, kwargs)


def compare(
    build: Callable[[], Sequence[Scene]], around: Around = nullcontext, *, dynamic: bool = False
) -> None:
    """Play the second scene on the artifact of the first, printed and referred."""
    sights = []
    for view in (printed, referred):
        torch.manual_seed(0)
        first, second = build()
        compiled = aotdist.compile(first.fn, backend="fx", settings={"dynamic": dynamic})
        with around():
            compiled(*first.args, **first.kwargs)
        (artifact,) = compiled_call(compiled).artifacts
        torch.manual_seed(1)
        sights.append(play(second, view(artifact), around=around))
    assert_same(*sights)


def compare_generated(program: Any, around: Around = nullcontext, *, dynamic: bool = False) -> None:
    assume(program.runs_in_eager(around))
    try:
        compare(program.scenes, around, dynamic=dynamic)
    except UnsupportedProgram as refusal:
        event(f"refused: {refusal.what}")


@search
@given(programs(inputs=(*INPUTS.values(), *WRAPPERS)))
def test_generated_programs(program):
    compare_generated(program)


@search
@given(programs(inputs=(*INPUTS.values(), *WRAPPERS)))
def test_generated_programs_with_symbolic_sizes(program):
    compare_generated(program, dynamic=True)


@search
@given(programs(inputs=(*INPUTS.values(), *WRAPPERS)))
def test_generated_programs_under_no_grad(program):
    compare_generated(program, torch.no_grad)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(()))
        self.cache = [torch.zeros(3, 4)]

    def forward(self, x, *, scale):
        self.steps = self.steps + 1
        self.cache[0] = x.detach()
        self.last = (x * 2, {"steps": self.steps})
        return {"y": self.norm(self.linear(x)) * scale, "steps": self.steps, "x": x, "row": x[0]}


@pytest.mark.parametrize("around", [nullcontext, torch.no_grad], ids=["grad", "no_grad"])
def test_a_module_with_state(around):
    def build() -> list[Scene]:
        model = Counting()
        return [Scene(model, (torch.randn(3, 4),), {"scale": 2.0}, {"cache": model.cache}) for _ in range(2)]

    compare(build, around)
