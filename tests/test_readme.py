"""The README's examples run as they stand, its numbers are those that were measured, and it is short."""

import re
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.pages import python_blocks, run
from tests.scripts import run_python

README = (ROOT / "README.md").read_text()
EXAMPLES = python_blocks(README)


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120
    assert len(EXAMPLES) == 2
    assert all(len(example.splitlines()) <= 18 for example in EXAMPLES)


def test_its_numbers_are_those_that_were_measured() -> None:
    shown = re.findall(r"(?<=\| )[\d.]+ (?:ms|s|MiB)(?= \|)", README)
    measured = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    assert len(shown) == 24
    assert [number for number in shown if f"| {number} (" not in measured] == []


def test_plain(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[0])
    assert "step · inference · fx" in run_python(str(script))


@pytest.mark.ranks
def test_fsdp2(tmp_path: Path) -> None:
    assert "reduce_scatter_tensor" in run(EXAMPLES[1], tmp_path, ranks=2)
