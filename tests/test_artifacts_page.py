"""The examples of docs/artifacts.md run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.pages import python_blocks

ALONE, RANKS = python_blocks((ROOT / "docs" / "artifacts.md").read_text())


def run(folder: Path, *command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_alone(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(ALONE)
    printed = run(tmp_path, "example.py")
    for comment in re.findall(r"  # (.*)$", ALONE, re.MULTILINE):
        assert comment in printed


@pytest.mark.ranks
def test_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    build = (
        "-m",
        "aotdist.launch.commands.main",
        "build",
        "train.py:make",
        "--world-size",
        "2",
        "-o",
        "step.aot",
    )
    assert "for cpu and 2 ranks: one record" in run(tmp_path, *build)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py")
    assert run(tmp_path, *launch).count("[(128, 64), (128,), (5, 256), (5,)]") == 2
