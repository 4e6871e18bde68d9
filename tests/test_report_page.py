"""The examples of docs/report.md run as they stand, and leave a page and a trace."""

import re
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.pages import python_blocks, run

BLOCKS = python_blocks((ROOT / "docs" / "report.md").read_text())
EXAMPLE = "\n".join(BLOCKS)


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run(EXAMPLE, tmp_path)
    for comment in re.findall(r"  # (.*)$", EXAMPLE, re.MULTILINE):
        assert comment in printed
    assert "<!doctype html>" in (tmp_path / "report.html").read_text()
    assert "Sequential backward" in printed
    assert (tmp_path / "trace.json.gz").exists()
