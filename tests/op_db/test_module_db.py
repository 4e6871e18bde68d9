"""Every module of PyTorch's database is the same compiled, in training and in evaluation."""

import pytest
import torch

from tests.op_db.exceptions import FLOAT, assert_same_as_eager, spread
from tests.op_db.samples import module_cases, module_names

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="the exceptions are those of one version's database"
)

CHUNKS = 6


def of_chunk(chunk: int) -> list[str]:
    return module_names()[chunk::CHUNKS]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_first_sample(chunk: int) -> None:
    assert_same_as_eager(case for name in of_chunk(chunk) for case in spread(module_cases(name, FLOAT)))


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_sample(chunk: int) -> None:
    assert_same_as_eager(case for name in of_chunk(chunk) for case in module_cases(name, FLOAT))
