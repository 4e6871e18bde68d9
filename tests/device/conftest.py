"""Where the tests run that need a GPU; the programs that they run are those of `tests/kernels`."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture
def in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions multiply in float32: what compilers make of small ones does, where cuDNN takes TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
