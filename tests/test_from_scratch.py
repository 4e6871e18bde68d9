"""The idea in one file runs, and finds eager's bits."""

from tests.house.tree import ROOT
from tests.scripts import run_script


def test_runs() -> None:
    told = run_script(ROOT / "docs" / "from_scratch.py")
    assert told.endswith(
        "same bits as eager; 2 values kept for the backward; one all-reduce for two gradients\n"
    )
    assert "aotdist" not in told
