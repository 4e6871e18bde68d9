"""accelerate's own test scripts pass on two ranks with our plugin."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.sweep
@pytest.mark.ranks
@pytest.mark.parametrize("script", ["test_ops", "test_script", "test_sync"])
def test_script_of_accelerate(script: str) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, str(Path(__file__).parent / "accelerate_script.py"), script]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
