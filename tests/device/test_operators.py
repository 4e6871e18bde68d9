"""Every operator of PyTorch's database gives eager's values and gradients on the GPU that is here."""

import pytest
import torch

from tests.device.there import eagers_on, same_on
from tests.kernels.test_operators import CHUNKS, check
from tests.kernels.test_operators import quiet as quiet

pytestmark = [pytest.mark.device, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_first_samples(chunk: int, dtype: torch.dtype, device: torch.device) -> None:
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
    check(chunk, dtype, 1, same_on(device, **tolerance), eagers_on(device))


@pytest.mark.sweep
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_several_samples(chunk: int, device: torch.device) -> None:
    check(chunk, torch.float32, 4, same_on(device), eagers_on(device))
