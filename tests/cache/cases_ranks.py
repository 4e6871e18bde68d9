"""What the ranks of `test_backend.py` run."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import aotdist
from aotdist.codegen.inductor import InductorBackend
from tests.artifacts.programs import sharded_evenly


def compiled_by(folder: str) -> int:
    """How many graphs this rank rewrote or emitted; its step is close to eager's."""
    made = 0

    def counted(original: Any) -> Any:
        def counting(*args: Any) -> Any:
            nonlocal made
            made += 1
            return original(*args)

        return counting

    expected = _gradients(*sharded_evenly())
    model, args = sharded_evenly()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("prepare_joint", "emit"):
            patch.setattr(InductorBackend, name, counted(getattr(InductorBackend, name)))
        dist.barrier()
        aotdist.compile(model, backend="inductor", settings={"cache_folder": folder})
        for ours, theirs in zip(_gradients(model, args), expected, strict=True):
            torch.testing.assert_close(ours, theirs)
    return made


def _gradients(model: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> list[Any]:
    model(*args).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]
