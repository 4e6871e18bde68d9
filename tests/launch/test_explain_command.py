"""`aotdist explain`: a model that is named on the command line, shown and written as a page."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from aotdist.codegen.fx import FxBackend
from aotdist.codegen.inductor import InductorBackend
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


STEP = """
import torch

def step():
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(x):
        model(x).sum().backward()
        optimizer.step()

    return train, (torch.randn(2, 4),)
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
    differences = program["ranks"]["differences"]
    assert set(differences["input 0.weight"]) == {"0", "1"}


def test_without_gradients(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{file}:plain", "--inference"]) == 0
    assert "Linear · inference · fx" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["explain", "build"])
def test_a_whole_step_is_told_apart_from_a_model(
    command: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(STEP)
    assert main([command, f"{file}:step"]) == 1
    said = capsys.readouterr().err
    assert "`train` is a whole training step" in said and "fix: make the model instead" in said


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


@pytest.mark.parametrize(("backend", "shown"), [("fx", "fx"), ("auto", "inductor"), (None, "fx")])
def test_by_a_backend(
    backend: str | None,
    shown: str,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InductorBackend, "emit", lambda self, *given: FxBackend().emit(*given))  # not to wait
    options = [] if backend is None else ["--backend", backend]
    assert main(["explain", f"{file}:plain", *options]) == 0
    assert f"Linear · training · {shown}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain", "--backend", "fxx"], "did you mean 'fx'"),
        (["explain", "--backend", "eager"], "compiles nothing"),
        (["explain", "--target", "sm_90", "--backend", "inductor"], "for sm_90 it is 'triton'"),
        (["build", "--backend", "inductor"], "for cpu it is 'fx'"),
        (["build", "--target", "sm_90", "--backend", "fx"], "for sm_90 it is 'triton'"),
    ],
)
def test_a_backend_that_cannot_be(
    words: list[str], said: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, f"{file}:plain"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["fx", "auto"])
def test_a_file_is_built_by_the_backend_of_its_target(
    backend: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plain.aot"
    assert main(["build", f"{file}:plain", "--backend", backend, "-o", str(path)]) == 0
    assert path.exists() and "for cpu and 1 rank" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["{file}:mak", "{file}", "explained_module:mak"])
@pytest.mark.parametrize("command", ["explain", "build", "bench"])
def test_functions_that_there_are_are_listed(
    command: str, name: str, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = MODEL + "\ndef _of_nobody(): pass\ndef takes(x): pass\n"
    for each in (file, file.with_name("explained_module.py")):
        each.write_text(text)
    monkeypatch.syspath_prepend(file.parent)
    name = name.format(file=file)
    assert main([command, name]) == 2
    said = capsys.readouterr().err
    place = name.rpartition(":")[0] or name
    assert f"MODEL is '{name}', which names no function" in said
    assert said.endswith(f"; {place} has make, plain\n")


@pytest.mark.parametrize("words", [["explain", "{file}:plain"], ["cache", "ls"]])
def test_output_that_nobody_reads_is_no_error(words: list[str], file: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "aotdist", *words]
    command = [word.format(file=file) for word in command]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    said = [line for line in ended.stderr.splitlines() if not line.startswith("aotdist: compiling")]
    assert (ended.returncode, said) == (128 + signal.SIGPIPE, [])


@pytest.mark.parametrize("name", ["{file}:nothing", ".:make", ".models:make", ":make"])
def test_a_model_that_is_not_there(name: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name.format(file=file)]) == 2
    assert "names no function" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option", "module"),
    [("explain", "--html", "aotdist.report.explain"), ("build", "--output", "aotdist.artifacts.archive")],
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
