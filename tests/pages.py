"""The Python of a page, and what it prints when it runs as it stands."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path


def python_blocks(page: str) -> list[str]:
    """The blocks of Python in the text of a page."""
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def run(block: str, folder: Path, *, ranks: int = 1) -> str:
    """Run a block as a script of its own, on so many ranks under torchrun, and return what it prints."""
    script = folder / "example.py"
    script.write_text(block)
    # torch announces that its own semi-structured classes may change, which is not what a page is about.
    launcher = [sys.executable, "-W", "ignore:The PyTorch API of SparseSemiStructuredTensor:UserWarning"]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    # A thread of gloo's that lets go of a tensor while Python shuts down aborts the process, eager ones too
    # (PyTorch's pull request 179291 has the reason): on a busy machine, one run of twenty.
    launch = partial(subprocess.run, [*launcher, str(script)], capture_output=True, text=True, timeout=110)
    done = launch()
    if "terminate called without an active exception" in done.stderr:
        done = launch()
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
