"""Losses by chunks are eager's on the GPU that is here; there they are summed up by products of their own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.op_db.samples import copies
from tests.passes.test_chunk_losses import CLASSES, LOSSES, TOLERANCE, chunked, examples, outcome

pytestmark = [pytest.mark.device, pytest.mark.timeout(300)]


@pytest.mark.parametrize("backend", ["fx", "triton"])
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_and_its_gradients_are_eager_s(
    loss: Callable[..., Tensor], dtype: torch.dtype, backend: str, device: torch.device
) -> None:
    args = copies(examples(dtype), device)
    compiled = chunked(loss, 16 * CLASSES * dtype.itemsize, backend)
    torch.testing.assert_close(outcome(compiled, args), outcome(loss, args), **TOLERANCE[dtype])
