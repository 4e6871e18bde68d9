"""The examples of docs/float8.md run as they stand, and its numbers are those of the runs that it shows."""

import re
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.pages import python_blocks, run

PAGE = (ROOT / "docs" / "float8.md").read_text()
ALONE, SHARDED = python_blocks(PAGE)


@pytest.mark.slow
def test_alone(tmp_path: Path) -> None:
    printed = run(ALONE, tmp_path)
    for comment in re.findall(r"# (.*)$", ALONE, re.MULTILINE)[:2]:
        for part in comment.removeprefix("converted: ").split("; "):
            assert part in printed


@pytest.mark.sweep
@pytest.mark.ranks
def test_sharded(tmp_path: Path) -> None:
    printed = run(SHARDED, tmp_path, ranks=2)
    assert "float8 (delayed, gathered in float8): 0.1, 1.1, 2.1, 3.1" in printed


def test_every_recipe_stays_within_a_percent() -> None:
    differences = re.findall(r"^\| `(\w+)` \| [\d.]+ \| ([+-][\d.]+)% \|", PAGE, re.MULTILINE)
    assert [name for name, _ in differences] == [
        "bf16", "delayed", "blockwise", "tensorwise", "rowwise", "rowwise_with_gw_hp",
    ]  # fmt: skip
    assert all(abs(float(percent)) < 1 for _, percent in differences)
