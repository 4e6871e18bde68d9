"""Kernels of any size are eager's on the GPU that is here, and one compilation serves many calls."""

import pytest
import torch

from tests.kernels.test_dynamic import PROGRAMS, ROWS, assert_all_served, numbers

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_compilation_serves_all_sizes(name: str, device: torch.device) -> None:
    calls = [(numbers(*sizes).detach().to(device).requires_grad_(),) for sizes in (*ROWS, *ROWS)]
    assert_all_served(PROGRAMS[name], calls, rtol=1e-6, atol=1e-9)
