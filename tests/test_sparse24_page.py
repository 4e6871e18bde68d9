"""The examples in docs/sparse24.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "sparse24.md"


def sections() -> dict[str, list[str]]:
    """The Python blocks under each heading; "" is the top of the page."""
    _, *parts = re.split(r"^#+ ", PAGE.read_text(), flags=re.MULTILINE)
    blocks = {part.partition("\n")[0]: re.findall(r"```python\n(.*?)```", part, re.DOTALL) for part in parts}
    return {("" if heading == "2:4 sparsity" else heading): found for heading, found in blocks.items()}


def run(script: Path, *, ranks: int) -> str:
    launcher = [sys.executable, "-W", "ignore:The PyTorch API of SparseSemiStructuredTensor:UserWarning"]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run([*launcher, str(script)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "heading, says",
    [("", "2:4 weight, row mask"), ("Packed", ""), ("Sparse activations", "")],
    ids=["first", "packed", "activations"],
)
def test_examples_run(heading: str, says: str, tmp_path: Path) -> None:
    (example,) = sections()[heading]
    script = tmp_path / "example.py"
    script.write_text(example)
    assert says in run(script, ranks=1)


@pytest.mark.ranks
def test_the_sharded_example_runs(tmp_path: Path) -> None:
    (example,) = sections()["Sharded"]
    script = tmp_path / "sharded.py"
    script.write_text(example)
    run(script, ranks=2)


def test_every_example_is_run() -> None:
    assert {heading for heading, found in sections().items() if found} == {
        "",
        "Packed",
        "Sparse activations",
        "Sharded",
    }
