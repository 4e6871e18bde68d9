"""Memory that one step frees is there for the next one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aotdist.settings import Settings
from tests.scripts import run_script

PROGRAM = """
import resource
import torch
import aotdist

aotdist.compile(lambda x: x + 1, backend="fx")(torch.ones(2))

storages = [torch.empty(0, dtype=torch.uint8).untyped_storage() for _ in range(96)]

def step():  # 96 MiB, 24,576 pages, and no small blocks beside them, which would hold the end of the heap
    for storage in storages:
        storage.resize_(1 << 20)
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(1)
    for storage in reversed(storages):
        storage.resize_(0)

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc's heap")
def test_a_step_finds_the_memory_of_the_one_before(tmp_path: Path) -> None:
    assert _faults_of_a_step(tmp_path, {}) < 600


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc's heap")
def test_what_the_environment_says_of_the_heap_holds(tmp_path: Path) -> None:
    assert _faults_of_a_step(tmp_path, {"MALLOC_TRIM_THRESHOLD_": str(1 << 20)}) > 20_000


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc's heap")
def test_the_setting_leaves_the_heap_alone(tmp_path: Path) -> None:
    assert _faults_of_a_step(tmp_path, {"AOTDIST_KEEP_FREED_MEMORY": "0"}) > 20_000
    settings = Settings(keep_freed_memory=False)
    assert settings.fingerprint() == Settings().fingerprint()  # what is cached serves both


def _faults_of_a_step(folder: Path, environment: dict[str, str]) -> int:
    script = folder / "step.py"
    script.write_text(PROGRAM)
    return int(run_script(script, environment=environment))
