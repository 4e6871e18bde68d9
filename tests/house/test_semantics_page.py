"""The page that shows programs and what was made of them is what they are made of today."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="graphs differ from torch to torch")
def test_the_page_is_up_to_date() -> None:
    written = subprocess.run(
        [sys.executable, str(DOCS / "semantics.py")], capture_output=True, text=True, check=True
    )
    assert written.stdout == (DOCS / "semantics.md").read_text(), "run `make docs`"
