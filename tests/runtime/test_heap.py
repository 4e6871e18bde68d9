"""Memory that one step frees is there for the next one."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
import torch
from aotdist.runtime.heap import keep_freed_memory

keep_freed_memory()

def step():
    blocks = [torch.ones(1 << 18) for _ in range(24)]  # 24 MiB: 6,144 pages
    del blocks

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="about glibc's heap")
def test_a_step_finds_the_memory_of_the_one_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=100
    )
    assert int(done.stdout) < 600
