"""The examples of docs/export.md run as they stand."""

import re
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.pages import python_blocks, run

EXAMPLES = python_blocks((ROOT / "docs" / "export.md").read_text())


@pytest.mark.parametrize("example", EXAMPLES, ids=["export", "fake tensors", "freeze"])
def test_example(example: str, tmp_path: Path) -> None:
    printed = run(example.replace('"model.aot"', repr(str(tmp_path / "model.aot"))), tmp_path)
    for comment in re.findall(r"^ *print.*  # (.*)$", example, re.MULTILINE):
        assert comment in printed
