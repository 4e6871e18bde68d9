"""The examples of docs/torch_compile.md run as they stand."""

import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.pages import python_blocks, run

EXAMPLES = python_blocks((ROOT / "docs" / "torch_compile.md").read_text())
KNOWN = "aotdist" in entry_points(group="torch_dynamo_backends").names


@pytest.mark.skipif(not KNOWN, reason="aotdist was installed before there was a backend: `make setup`")
@pytest.mark.parametrize("example", EXAMPLES, ids=["torch.compile", "compile_backward"])
def test_examples(example: str, tmp_path: Path) -> None:
    printed = run(example, tmp_path)
    for comment in re.findall(r"  # (.*)$", example, re.MULTILINE):
        assert comment in printed
