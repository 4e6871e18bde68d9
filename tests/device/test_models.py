"""Real models train through kernels on the GPU that is here as they do in eager."""

import pytest
import torch

from tests.kernels.test_models import FAMILIES, assert_gradients_are_eager_s, family

pytestmark = [pytest.mark.device, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_eager_s(name: str, device: torch.device) -> None:
    model, batch = family(name)
    there = {key: value.to(device) for key, value in batch.items()}
    assert_gradients_are_eager_s(model.to(device), there, rtol=1e-3, atol=1e-5)
