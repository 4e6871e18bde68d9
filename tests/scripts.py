"""Scripts in processes of their own, alone and under torchrun."""

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from tests.ranks.harness import fork_server


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


def run_script(
    script: Path, *options: str, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """What a script prints in a process forked from one that has imported torch, for which another takes 3 s.

    Raises:
        AssertionError: it failed; the message is the end of what it said.
    """
    with tempfile.TemporaryDirectory() as logs:
        printed, said = Path(logs, "printed"), Path(logs, "said")
        words, place = [str(script), *options], folder or Path.cwd()
        arguments = (words, place, {**os.environ, **(environment or {})}, printed, said)
        process = fork_server().Process(target=_as_main, args=arguments)
        process.start()
        process.join(110)
        process.kill()
        process.join()
        assert process.exitcode == 0, said.read_text()[-3000:]
        return printed.read_text()


def _as_main(
    words: list[str], folder: Path, environment: Mapping[str, str], printed: Path, said: Path
) -> None:
    for stream, path in ((1, printed), (2, said)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
