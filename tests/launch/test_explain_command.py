"""`aotdist explain`: a model that is named on the command line, shown and written as a page."""

import errno
import json
import re
from pathlib import Path
from typing import NoReturn

import pytest

from aotdist.launch.commands.main import main

MODEL = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def make():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))), (torch.randn(2, 4),)

def plain():
    return torch.nn.Linear(4, 3), (torch.randn(2, 4),)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "explained_model.py"
    file.write_text(MODEL)
    return file


def test_a_model_is_explained_for_all_its_ranks(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert main(["explain", f"{file}:make", "--world-size", "2", "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "reduce_scatter_tensor" in shown and f"{page}: open it in a browser" in shown
    data = re.search(r'id="data">(.*)</script>', page.read_text())
    assert data
    (program,) = json.loads(data[1])
    differences = {one["what"]: one["values"] for one in program["ranks"]["differences"]}
    assert set(differences["input 0.weight"]) == {"0", "1"}


def test_without_gradients(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{file}:plain", "--inference"]) == 0
    assert "Linear · inference · fx" in capsys.readouterr().out


@pytest.mark.parametrize(("page", "said"), [("", "is a folder"), ("none/report.html", "does not exist")])
@pytest.mark.parametrize(("command", "option"), [("explain", "--html"), ("build", "--output")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_made(
    command: str, option: str, page: str, said: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("def fails():\n    raise RuntimeError")
    assert main([command, f"{file}:fails", option, page]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "build"])
def test_what_makes_a_model_needs_no_arguments(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "torch.nn:Linear"]) == 2
    assert "`Linear` is called without arguments" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["{file}:nothing", ".:make", ".models:make", ":make"])
def test_a_model_that_is_not_there(name: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name.format(file=file)]) == 2
    assert "names no function" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option", "module"),
    [("explain", "--html", "aotdist.report.explain"), ("build", "--output", "aotdist.store.archive")],
)
def test_a_full_disk_is_told_in_a_line(
    command: str,
    option: str,
    module: str,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write_whole(*_args: object, **_options: object) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"{module}.write_whole", write_whole)
    assert main([command, f"{file}:plain", option, str(file.with_suffix(".out"))]) == 1
    said = capsys.readouterr().err
    assert "No space left on device\n  fix: free some of it" in said and "Traceback" not in said
