"""The README's examples run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"

# The third example says "under torchrun" like the second, and leaves the process group to its reader.
AROUND_TENSOR_PARALLEL = """
import functools, torch, torch.distributed as dist, aotdist
dist.init_process_group("gloo")
{}
assert all(parameter.grad is not None for parameter in mlp.parameters())
dist.destroy_process_group()
"""


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def run(script: Path, *, ranks: int) -> str:
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run([*launcher, str(script)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_examples_are_short() -> None:
    assert len(examples()) == 3
    assert all(len(example.splitlines()) <= 16 for example in examples())


@pytest.mark.slow
def test_plain(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text(examples()[0])
    assert "training" in run(script, ranks=1)


@pytest.mark.ranks
def test_fsdp2(tmp_path: Path) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(examples()[1])
    assert "reduce_scatter_tensor" in run(script, ranks=2)


@pytest.mark.ranks
def test_tensor_parallel(tmp_path: Path) -> None:
    script = tmp_path / "split.py"
    script.write_text(AROUND_TENSOR_PARALLEL.format(examples()[2].replace("@aotdist.compile", "@fx")))
    text = script.read_text().replace(
        "mesh =", 'fx = lambda fn: aotdist.compile(fn, backend="fx")\nmesh =', 1
    )
    script.write_text(text)
    run(script, ranks=2)
