"""The examples of docs/artifacts.md run as they stand."""

import re
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.pages import python_blocks
from tests.scripts import run_python, run_script, torchrun

ALONE, RANKS = python_blocks((ROOT / "docs" / "artifacts.md").read_text())


def run(folder: Path, *words: str) -> str:
    return run_python(*words, folder=folder, environment={"PYTHONPATH": str(ROOT)})


def test_alone(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(ALONE)
    printed = run_script(script, folder=tmp_path)
    for comment in re.findall(r"  # (.*)$", ALONE, re.MULTILINE):
        assert comment in printed


@pytest.mark.sweep
@pytest.mark.ranks
def test_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    build = (
        "-m",
        "aotdist",
        "build",
        "train.py:make",
        "--world-size",
        "2",
        "-o",
        "step.aot",
    )
    assert "for cpu and 2 ranks: one record" in run(tmp_path, *build)
    assert run(tmp_path, *torchrun(2), "train.py").count("[(128, 64), (128,), (5, 256), (5,)]") == 2
