"""The examples of docs/accelerate.md run as they stand, on one rank and on two."""

import re
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.pages import python_blocks, run

EXAMPLE = "".join(python_blocks((ROOT / "docs" / "accelerate.md").read_text()))


def test_example(tmp_path: Path) -> None:
    printed = run(EXAMPLE, tmp_path)
    comments = re.findall(r"  # (.*)$", EXAMPLE, re.MULTILINE)
    assert len(comments) == 2 and all(comment in printed for comment in comments)


@pytest.mark.sweep
@pytest.mark.ranks
def test_example_on_two_ranks(tmp_path: Path) -> None:
    assert "FSDPSequential" in run(EXAMPLE, tmp_path, ranks=2)
