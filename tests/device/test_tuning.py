"""Kernels are measured on the GPU that is here, once, and go on computing what eager does."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import aotdist

pytestmark = [pytest.mark.device, pytest.mark.timeout(600)]


def test_the_quickest_way_is_kept(device: torch.device, tmp_path: Path) -> None:
    x = torch.randn(4096, 4096, device=device)
    folder = {"cache_folder": str(tmp_path)}
    compiled = aotdist.compile(F.gelu, backend="triton", settings=folder)
    torch.testing.assert_close(compiled(x), F.gelu(x), rtol=1e-4, atol=1e-5)
    (file,) = (tmp_path / "kernels").iterdir()
    written = file.stat().st_mtime_ns
    again = aotdist.compile(lambda y: F.gelu(y), backend="triton", settings=folder)
    torch.testing.assert_close(again(x), compiled(x), rtol=0, atol=0)
    assert file.stat().st_mtime_ns == written
    (graph,) = (g for g in again.explain().artifacts[0].graphs if g.fusion)  # type: ignore[attr-defined]
    assert graph.fusion.kernels[0].registers > 0


def test_what_is_written_over_is_written_once(device: torch.device, tmp_path: Path) -> None:
    def step(x: torch.Tensor) -> None:
        x.mul_(1.5).add_(1)

    x = torch.randn(4096, 4096, device=device)
    expected = x * 1.5 + 1
    aotdist.compile(step, backend="triton", settings={"cache_folder": str(tmp_path)})(x)
    torch.testing.assert_close(x, expected)
