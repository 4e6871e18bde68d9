"""The same under torchrun, whose agent hosts the store."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]


def test_ranks_diverge_agree_and_lose_one_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.ranks.under_torchrun"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    said = done.stdout  # the two ranks' lines may run into each other
    for line in ("[0] RankDivergence", "[1] RankDivergence", "[0] None", "[1] None"):
        assert line in said, said + done.stderr
    assert "rank 1 was lost while `train_step` ran: its process is gone" in said, said + done.stderr
