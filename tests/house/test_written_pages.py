"""The pages that show programs and what was made of them are what they are made of today."""

from pathlib import Path

import pytest
import torch

from tests.scripts import run_script

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="graphs differ from torch to torch")
@pytest.mark.parametrize("page", ["semantics", "emitter", "troubleshooting"])
def test_the_page_is_up_to_date(page: str) -> None:
    assert run_script(DOCS / f"{page}.py") == (DOCS / f"{page}.md").read_text(), "run `make docs`"
