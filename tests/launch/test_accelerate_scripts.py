"""accelerate's own test scripts pass on two ranks with our plugin."""

from pathlib import Path

import pytest

from tests.scripts import run_python, torchrun


@pytest.mark.sweep
@pytest.mark.ranks
@pytest.mark.parametrize("script", ["test_ops", "test_script", "test_sync"])
def test_script_of_accelerate(script: str) -> None:
    script_file = str(Path(__file__).parent / "accelerate_script.py")
    run_python(*torchrun(2), script_file, script, environment={"ACCELERATE_USE_CPU": "true"})
