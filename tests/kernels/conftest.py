"""The lasting world of two ranks, see `tests/ranks/harness.py`; and where kernels are run in Python."""

import pytest
import torch

from tests.ranks.harness import world2 as world2


@pytest.fixture(autouse=True)
def interpreted() -> None:
    """A process runs kernels in Python, on tensors of the CPU, or compiles them for GPUs."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, for which kernels are compiled: tests/device runs these programs on it")
