"""The example of docs/train_step.md runs as it stands."""

import re
from pathlib import Path

from tests.house.tree import ROOT
from tests.pages import python_blocks, run

(EXAMPLE,) = python_blocks((ROOT / "docs" / "train_step.md").read_text())


def test_example(tmp_path: Path) -> None:
    printed = run(EXAMPLE, tmp_path)
    for comment in re.findall(r"  # (.*)$", EXAMPLE, re.MULTILINE):
        assert comment in printed
