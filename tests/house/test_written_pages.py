"""The pages that show programs and what was made of them are what they are made of today."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="graphs differ from torch to torch")
@pytest.mark.parametrize("page", ["semantics", "emitter", "troubleshooting"])
def test_the_page_is_up_to_date(page: str) -> None:
    written = subprocess.run(
        [sys.executable, str(DOCS / f"{page}.py")], capture_output=True, text=True, check=True
    )
    assert written.stdout == (DOCS / f"{page}.md").read_text(), "run `make docs`"
