"""Operators of PyTorch's database under Inductor: eager's values and random numbers, but for rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import Any

import pytest
import torch

from tests.op_db.exceptions import BFLOAT, FLOAT, KNOWN, Kind
from tests.op_db.rounding import beyond_rounding
from tests.op_db.samples import Case, Scene, Walk, operator_cases, operator_names

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the samples are those of one version's database"
)

CHUNKS = 60
INTEGERS = Walk(torch.int64)
chunks = pytest.mark.parametrize("chunk", range(CHUNKS))


def is_defined(case: Case) -> bool:
    """Whether eager says what its result is: not if it returns new memory as it is."""
    return all(known.kind is not Kind.UNDEFINED for known in KNOWN.get(case.program, ()))


def assert_same_but_for_rounding(chunk: int, walk: Walk) -> None:
    """Fail with what differs of the first sample of each operator of a chunk, and of its variant in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tensors in beta state, which some samples are made of
        cases = [case for name in operator_names()[chunk::CHUNKS] for case in first_sample(name, walk)]
        found = [beyond_rounding(case, "inductor") for case in cases if is_defined(case)]
    assert found
    assert list(filter(None, found)) == []


def first_sample(name: str, walk: Walk) -> Iterator[Case]:
    return takewhile(lambda case: case.number == 0, operator_cases(name, walk))


@pytest.mark.timeout(600)
@chunks
def test_first_sample(chunk: int) -> None:
    assert_same_but_for_rounding(chunk, FLOAT)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("walk", [INTEGERS, BFLOAT], ids=str)
@chunks
def test_first_sample_of_another_kind(chunk: int, walk: Walk) -> None:
    assert_same_but_for_rounding(chunk, walk)


def test_a_nan_is_found() -> None:
    def spoiling(gm: torch.fx.GraphModule, fakes: list[Any]) -> Callable[..., Any]:
        return lambda *args: [out * float("nan") for out in gm(*args)]

    scene = Scene(lambda x: x * 2, lambda: ([torch.ones(2)], {}), [])
    assert "not close" in beyond_rounding(Case("doubled", 0, FLOAT, lambda: scene), spoiling)
