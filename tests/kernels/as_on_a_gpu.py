"""Lets kernels be cut into blocks as on a GPU and be tuned, where they are interpreted on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from aotdist.codegen import triton
from aotdist.kernels import costs, triton_seam
from aotdist.kernels.tuning import Choices, Tuner


@dataclass
class Timekeeper:
    """A clock by which what is measured later is quicker.

    Args:
        num_asked: how often it was asked.
    """

    num_asked: int = 0

    def __call__(self, start: Callable[[], None]) -> float:
        start()
        self.num_asked += 1
        return 1 / self.num_asked


def cut_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted kernels have the blocks that compiled ones have; small ones have several ways, too."""
    triton_seam.namespace()  # the interpreter is repaired while it says that it is one
    monkeypatch.setattr(triton_seam, "is_interpreting", lambda: False)
    monkeypatch.setattr(triton, "_refuse_cpu", lambda graph: None)
    monkeypatch.setattr(triton, "_tuner", lambda settings: None)
    monkeypatch.setattr(costs, "_SMALL_SECONDS", 0.0)


def tune(
    monkeypatch: pytest.MonkeyPatch, clock: Timekeeper, folder: Path, *, reductions: bool = True
) -> None:
    """Such kernels are measured by a clock, which a folder remembers."""
    cut_as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(triton_seam, "gpu_and_version", lambda: ("a GPU", "3"))
    # A program reads the folder anew, as one of another process would.
    monkeypatch.setattr(triton, "_tuner", lambda settings: Tuner(Choices(folder), reductions, clock))
