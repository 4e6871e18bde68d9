"""Operators of PyTorch's database under Inductor: eager's values and random numbers, but for rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.op_db.exceptions import FLOAT, KNOWN, Kind
from tests.op_db.rounding import beyond_rounding
from tests.op_db.samples import Case, Scene, operator_cases, operator_names

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the samples are those of one version's database"
)

CHUNKS = 60


def is_defined(case: Case) -> bool:
    """Whether eager says what its result is: not if it returns new memory as it is."""
    return all(known.kind is not Kind.UNDEFINED for known in KNOWN.get(case.program, ()))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_first_sample(chunk: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors in beta state, which some samples are made of
        cases = (next(iter(operator_cases(name, FLOAT)), None) for name in operator_names()[chunk::CHUNKS])
        found = [beyond_rounding(case, "inductor") for case in cases if case is not None and is_defined(case)]
    assert found
    assert list(filter(None, found)) == []


def test_a_nan_is_found() -> None:
    def spoiling(gm: torch.fx.GraphModule, fakes: list[Any]) -> Callable[..., Any]:
        return lambda *args: [out * float("nan") for out in gm(*args)]

    scene = Scene(lambda x: x * 2, lambda: ([torch.ones(2)], {}), [])
    assert "not close" in beyond_rounding(Case("doubled", 0, FLOAT, lambda: scene), spoiling)
