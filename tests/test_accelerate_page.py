"""The example of docs/accelerate.md runs as it stands, on one rank and on two."""

import re
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.pages import python_blocks, run

(EXAMPLE,) = python_blocks((ROOT / "docs" / "accelerate.md").read_text())


def test_example(tmp_path: Path) -> None:
    printed = run(EXAMPLE, tmp_path)
    for comment in re.findall(r"  # (.*)$", EXAMPLE, re.MULTILINE):
        assert comment in printed


@pytest.mark.sweep
@pytest.mark.ranks
def test_example_on_two_ranks(tmp_path: Path) -> None:
    assert "FSDPSequential" in run(EXAMPLE, tmp_path, ranks=2)
