"""Every operator of PyTorch's database is the same compiled: values, layout, gradients, random numbers."""

from collections.abc import Iterator
from itertools import takewhile

import pytest
import torch

from tests.op_db.exceptions import (
    DYNAMIC,
    EXCEPTIONS,
    FLOAT,
    KNOWN,
    WALKS,
    Kind,
    Known,
    assert_same_as_eager,
    problems,
    spread,
)
from tests.op_db.samples import Case, Scene, Walk, module_names, operator_cases, operator_names

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the exceptions are those of one version's database"
)

CHUNKS = 20
SUBSET = 4
"""How many samples of an operator a sweep takes of the walks that are not its main one."""

OTHER_WALKS = [walk for walk in WALKS if walk != FLOAT]
chunks = pytest.mark.parametrize("chunk", range(CHUNKS))


def of_chunk(chunk: int) -> list[str]:
    return operator_names()[chunk::CHUNKS]


def first_cases(name: str) -> Iterator[Case]:
    """A few of an operator's: of the main walk, and of one other."""
    known = [known for program in (name, f"{name}_") for known in KNOWN.get(program, ())]
    last = max((each.first or 0 for each in known), default=0)
    for walk in (FLOAT, OTHER_WALKS[operator_names().index(name) % len(OTHER_WALKS)]):
        yield from spread(takewhile(lambda case: case.number <= last, operator_cases(name, walk)))


@chunks
def test_first_sample(chunk: int) -> None:
    assert_same_as_eager(case for name in of_chunk(chunk) for case in first_cases(name))


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@chunks
def test_every_sample(chunk: int) -> None:
    assert_same_as_eager(case for name in of_chunk(chunk) for case in operator_cases(name, FLOAT))


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("walk", OTHER_WALKS, ids=str)
@chunks
def test_several_samples_of_other_kinds(chunk: int, walk: Walk) -> None:
    assert_same_as_eager(
        case for name in of_chunk(chunk) for case in operator_cases(name, walk) if case.number < SUBSET
    )


def dynamic_cases(name: str, samples: int) -> Iterator[Case]:
    """Those without an exception: one that is refused is so with sizes of every kind."""
    cases = takewhile(lambda case: case.number < samples, operator_cases(name, DYNAMIC))
    return (case for case in cases if case.program not in KNOWN)


@chunks
def test_first_sample_with_symbolic_sizes(chunk: int) -> None:
    a_third = of_chunk(chunk)[chunk % 3 :: 3]
    assert_same_as_eager(case for name in a_third for case in dynamic_cases(name, 1))


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@chunks
def test_several_samples_with_symbolic_sizes(chunk: int) -> None:
    assert_same_as_eager(case for name in of_chunk(chunk) for case in dynamic_cases(name, SUBSET))


def test_exceptions_name_programs_of_the_databases() -> None:
    operators, modules = operator_names(), module_names()
    programs = {*operators, *(f"{name}_" for name in operators)}
    programs |= {f"{name} {mode}" for name in modules for mode in ("train", "eval")}
    assert [known.program for known in EXCEPTIONS if known.program not in programs] == []


def test_a_difference_is_found() -> None:
    def asking(x: torch.Tensor) -> torch.Tensor:
        return x * (2.0 if type(x) is torch.Tensor else 3.0)  # a traced tensor is of another class

    scene = Scene(asking, lambda: ([torch.ones(2)], {}), [])
    found = problems([Case("asking", 0, FLOAT, lambda: scene)])
    assert "out 0 values differ much" in "".join(found)


@pytest.mark.parametrize("kind", list(Kind))
def test_an_exception_that_does_not_show_is_found(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Known("sin", 0, (FLOAT,), kind, "values", "")
    monkeypatch.setattr("tests.op_db.exceptions.KNOWN", {"sin": (known,)})
    found = problems(case for case in operator_cases("sin", FLOAT) if case.number == 0)
    assert ["does not show its exception any more" in problem for problem in found] == [True]
