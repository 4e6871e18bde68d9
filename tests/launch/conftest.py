"""Fixtures of the launcher's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.launch.harness import Job, Runs
from tests.launch.jobs_on_ranks import batches
from tests.ranks.harness import world2 as world2


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 small Python files, the same everywhere."""
    root = tmp_path_factory.mktemp("text")
    for number in range(40):
        lines = [f"def function_{number}_{line}(x):\n    return x + {line}\n\n\n" for line in range(20)]
        (root / f"module_{number:02}.py").write_text("".join(lines))
    return root


@pytest.fixture
def job(text: Path, tmp_path: Path) -> Job:
    """A small job of this test's own."""
    return Job(text=text, folder=tmp_path)


@pytest.fixture(scope="session")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The jobs on several ranks."""
    return Runs(text, tmp_path_factory.mktemp("runs"), batches())


@pytest.fixture(autouse=True)
def process_settings() -> Iterator[None]:
    """A job in this process sets `use_deterministic_algorithms`; later tests get what was there before."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)
