"""The loop of assumptions: how often a program is traced, and what each trace takes for granted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import aotdist
from aotdist import assumptions as tracing
from aotdist.errors import UnsupportedProgram


@pytest.fixture
def assumed(monkeypatch: pytest.MonkeyPatch) -> list[tracing.Assumptions]:
    """What each trace of the test takes for granted, in order."""
    seen: list[tracing.Assumptions] = []
    once = tracing._trace_once

    def noting(job: Any, times: Any, assumptions: tracing.Assumptions) -> Any:
        seen.append(assumptions)
        return once(job, times, assumptions)

    monkeypatch.setattr(tracing, "_trace_once", noting)
    return seen


def written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + y


def test_a_plain_program_is_traced_once(assumed):
    aotdist.compile(written, backend="fx")(torch.ones(3), torch.ones(3))
    assert [len(one.bases.bases) for one in assumed] == [0]


def test_shared_memory_is_found_out_by_the_first_trace(assumed):
    shared = torch.ones(4)
    result = aotdist.compile(written, backend="fx")(shared[:3], shared[1:])
    assert [len(one.bases.bases) for one in assumed] == [0, 1]
    assert torch.equal(result, torch.tensor([4.0, 4.0, 3.0]))


def test_what_one_trace_showed_holds_for_the_next(assumed):
    """Sizes depend on data, and inputs share memory: the third trace assumes neither."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return written(x, y)[y > 1].sum()

    shared, other = torch.arange(4.0), torch.arange(4.0)
    ours = aotdist.compile(program, backend="fx")(shared[:3], shared[1:])
    assert torch.equal(ours, program(other[:3], other[1:]))
    assert [(len(one.bases.bases), one.of_data is not None) for one in assumed] == [
        (0, False),
        (0, True),
        (1, True),
    ]


def test_numbers_in_the_place_of_symbols(assumed):
    def program(x: torch.Tensor) -> torch.Tensor:
        if type(x.shape[0]) is not int:
            raise TypeError("takes no symbols")
        return x * 2

    compiled = aotdist.compile(program, backend="fx", dynamic=True)
    with pytest.warns(UserWarning, match="sizes at hand.*takes no symbols, at .*test_assumptions"):
        assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    assert [one.symbolic for one in assumed] == [True, False]


def test_an_error_that_contradicts_nothing_ends_the_loop(assumed):
    def program(x: torch.Tensor) -> torch.Tensor:
        x.untyped_storage().data_ptr()
        return torch.utils.swap_tensors(x, torch.ones(2))  # type: ignore[return-value]

    with pytest.raises(UnsupportedProgram):
        aotdist.compile(program, backend="fx")(torch.ones(3))
    assert len(assumed) == 1
