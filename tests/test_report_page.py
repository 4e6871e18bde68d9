"""The example of docs/report.md runs as it stands, and leaves a page."""

import re
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.pages import python_blocks, run

(EXAMPLE,) = python_blocks((ROOT / "docs" / "report.md").read_text())


def test_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run(EXAMPLE, tmp_path)
    for comment in re.findall(r"  # (.*)$", EXAMPLE, re.MULTILINE):
        assert comment in printed
    assert "<!doctype html>" in (tmp_path / "report.html").read_text()
