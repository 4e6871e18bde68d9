"""The Python of a page, and what it prints when it runs as it stands."""

import re
from pathlib import Path

from tests.scripts import run_python, run_script, torchrun


def python_blocks(page: str) -> list[str]:
    """The blocks of Python in the text of a page."""
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def run(block: str, folder: Path, *, ranks: int = 1) -> str:
    """Run a block as a script of its own, on so many ranks under torchrun, and return what it prints."""
    script = folder / "example.py"
    script.write_text(block)
    if ranks == 1:
        return run_script(script)
    # torch announces that its own semi-structured classes may change, which is not what a page is about.
    quietly = ("-W", "ignore:The PyTorch API of SparseSemiStructuredTensor:UserWarning")
    return run_python(*quietly, *torchrun(ranks), str(script))
