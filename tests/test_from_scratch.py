"""The idea in one file runs, and finds eager's bits."""

import subprocess
import sys

from tests.house.tree import ROOT


def test_runs() -> None:
    told = subprocess.run(
        [sys.executable, ROOT / "docs" / "from_scratch.py"], check=True, capture_output=True, text=True
    ).stdout
    assert told.endswith(
        "same bits as eager; 2 values kept for the backward; one all-reduce for two gradients\n"
    )
    assert "aotdist" not in told
