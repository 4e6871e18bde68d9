"""`aotdist bench`: times a step, and says whether its results are eager's."""

import math
from pathlib import Path

import pytest
import torch

from aotdist.launch.commands import bench
from aotdist.launch.commands.main import main

MODEL = """
import torch
from torch import nn

def model():
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.5), nn.Linear(8, 2))
    return layers, (torch.randn(3, 4),)

def large():
    return lambda x: ((x + 1) * 2).sum(), (torch.ones(1024, 1024),)

def reads_data():
    return lambda x: x * 2 if x.sum() > 0 else x, (torch.ones(3),)

def wants(x):
    return x

def makes_nothing():
    return None

def yields_nothing():
    yield from ()
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch, "compile", lambda target: target)  # takes a minute where it generates C++
    path = tmp_path / "benched.py"
    path.write_text(MODEL)
    return path


def test_times_and_results(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"{file}:model", "--backend", "fx", "--rounds", "2"]) == 0
    head, eager, peer, ours = capsys.readouterr().out.splitlines()
    assert (
        "first step" in head
        and "memory" in head
        and eager.startswith("eager ")
        and peer.startswith("torch.compile ")
    )
    assert ours.startswith("aotdist ") and ours.endswith("eager's, bit for bit")


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        ([0.0, 0.5], [math.nan, 0.5], "off eager's by at most nan"),
        ([0.5, 0.5], [0.25, math.nan], "off eager's by at most nan"),
        ([math.nan, math.inf], [math.nan, math.inf], "eager's, bit for bit"),
        ([math.nan, 0.5], [math.nan, 0.25], "off eager's by at most 2.5e-01"),
        ([], [], "no numbers to compare"),
    ],
)
def test_what_is_not_a_number_is_not_eager_s(own: list[float], other: list[float], said: str) -> None:
    ours, eager = (
        bench._Contender("name", list, results=[torch.tensor(numbers), torch.tensor(numbers[1:])])
        for numbers in (own, other)
    )
    assert bench._likeness(ours, eager) == said


def test_memory_is_what_a_step_holds_at_once(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"{file}:large", "--backend", "fx", "--rounds", "1", "--inference"]) == 0
    peaks = [line.partition(" MiB")[0].split()[-1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert peaks == ["8.00", "8.00", "8.00"]


def test_who_fails_is_left_out(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"{file}:reads_data", "--backend", "fx", "--rounds", "1", "--inference"]) == 1
    *_, ours = capsys.readouterr().out.splitlines()
    assert "failed: UnsupportedProgram" in ours


def test_wrong_use(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"{file}:model", "--rounds", "0"]) == 2
    assert "give 1 or more" in capsys.readouterr().err


def test_what_makes_it_needs_no_arguments(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"{file}:wants"]) == 2
    assert "`wants` is called without arguments: missing a required argument: 'x'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["makes_nothing", "yields_nothing"])
def test_what_makes_nothing(name: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"{file}:{name}"]) == 2
    assert "`make` returned NoneType" in capsys.readouterr().err
