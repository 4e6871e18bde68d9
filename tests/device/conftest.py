"""Where the tests run that need a GPU; the programs that they run are those of `tests/kernels`."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")
