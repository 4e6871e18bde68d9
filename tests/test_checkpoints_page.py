"""The two commands of docs/checkpoints.md, with a smaller model, do what the page says."""

import re
import shlex
from pathlib import Path

import pytest

from aotdist.launch import loggers
from aotdist.launch.commands.main import main
from aotdist.launch.metrics import METRICS_FILE, read_metrics
from tests.house.tree import ROOT
from tests.launch.harness import SMALL_MODEL, step_records

PAGE = (ROOT / "docs" / "checkpoints.md").read_text()
COMMANDS = re.search(r"```\n(aotdist train .*?)```", PAGE, re.DOTALL)


def test_the_second_command_goes_on_with_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert COMMANDS is not None
    first, second = (shlex.split(line)[1:] for line in COMMANDS[1].splitlines())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loggers, "draw_curve", lambda folder: None)
    for number in range(40):
        Path(f"module_{number}.py").write_text("def function(x):\n    return x\n" * 20)
    small = [word for word in SMALL_MODEL if not word.startswith("--checkpoint")]
    place = ["--data.root=.", "--compile.backend=eager"]
    assert main([*first, *small, *place, "--optim.steps=4", "--checkpoint.every=2"]) == 0
    assert main([*second, "--optim.steps=6"]) == 0
    assert "from step 4" in capsys.readouterr().out
    steps = step_records(read_metrics(Path("runs/first") / METRICS_FILE))
    assert [record.step for record in steps] == [1, 2, 3, 4, 5, 6]
