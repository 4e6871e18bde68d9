"""Random programs, and those that are one kernel, are eager's on the GPU that is here."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.device.there import same_on
from tests.kernels.reference import Emissions
from tests.kernels.test_fusion import ONE_KERNEL, numbers
from tests.kernels.test_programs import SIZES, Program, program_of, tensors

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # `device` is the same for all of them
@given(program_of(), SIZES, st.booleans(), st.booleans())
def test_random_programs(
    device: torch.device, program: Program, sizes: list[int], transposed: bool, grad: bool
) -> None:
    same_on(device, rtol=1e-6, atol=1e-9)(
        program, *tensors(sizes, torch.float64, transposed=transposed, grad=grad)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ONE_KERNEL)
def test_is_one_kernel(
    name: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    emissions = Emissions(monkeypatch)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    same_on(device, **tolerance)(ONE_KERNEL[name], numbers(6, 64, dtype=dtype))
    assert emissions.num_kernels() == 1
