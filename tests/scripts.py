"""Scripts in processes of their own, alone and under torchrun."""

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path


def torchrun(ranks: int) -> list[str]:
    """The words before a script that start it on so many ranks; none for one."""
    if ranks == 1:
        return []
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def run_python(*words: str, folder: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """What Python prints with these words, in a folder, with more in its environment.

    Raises:
        AssertionError: it failed; the message is the end of what it said.
    """
    launch = partial(
        subprocess.run,
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=110,
    )
    done = launch()
    # A thread of gloo's that lets go of a tensor while Python shuts down aborts the process, eager ones too
    # (PyTorch's pull request 179291 has the reason): on a busy machine, one run of twenty, and fewer with a
    # barrier at the end of the script.
    for _ in range(2):
        if "terminate called without an active exception" in done.stderr:
            done = launch()
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
