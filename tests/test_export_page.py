"""The examples of docs/export.md run as they stand, one after the other."""

import re
from pathlib import Path

from tests.house.tree import ROOT
from tests.pages import python_blocks, run

EXAMPLES = python_blocks((ROOT / "docs" / "export.md").read_text())


def test_examples(tmp_path: Path) -> None:
    script = "\n".join(EXAMPLES).replace('"model.aot"', repr(str(tmp_path / "model.aot")))
    printed = run(script, tmp_path)
    comments = re.findall(r"^ *print.*  # (.*)$", script, re.MULTILINE)
    assert len(comments) == 10
    for comment in comments:
        assert comment.replace(", then ", "\n") in printed
