"""What PyTorch's own logs are told, and `tlparse` makes of it."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import aotdist
from aotdist.report import progress
from tests.house.tree import ROOT

PROGRAM = """
import torch, aotdist
model = aotdist.compile(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), backend="fx")
model(torch.randn(3, 4)).sum().backward()
"""
TEXTS = {
    "backward_code",
    "backward_graph",
    "call",
    "forward_code",
    "forward_graph",
    "joint_graph",
    "report",
    "stages",
}


def compiled(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    with caplog.at_level(level, logger=progress.log.name):
        aotdist.compile(lambda x: x * 2, backend="fx")(torch.ones(2))
    return [record.getMessage() for record in caplog.records if record.name == progress.log.name]


def test_nothing_is_said_unless_asked(caplog):
    assert compiled(caplog, logging.WARNING) == []


def test_the_report(caplog):
    (message,) = compiled(caplog, logging.INFO)
    assert message.startswith("<lambda> · inference · fx\n")


def test_stages_graphs_and_calls(caplog):
    messages = compiled(caplog, logging.DEBUG)
    stages = [message for message in messages if " took " in message]
    assert stages[0].startswith("`<lambda>`: capture took ")
    titles = [message.splitlines()[0] for message in messages[len(stages) + 1 :]]
    assert titles == [f"`<lambda>`: {name}" for name in ("inference_graph", "inference_code", "call")]
    assert "torch.ops.aten.mul.Tensor" in messages[len(stages) + 1]


def test_variables_of_pytorch_and_tlparse(tmp_path: Path):
    environment = {"TORCH_LOGS": "+aotdist", "TORCH_TRACE": str(tmp_path / "trace"), "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", PROGRAM]
    told = subprocess.run(
        program, env=os.environ | environment, check=True, capture_output=True, text=True
    ).stderr
    assert "`Sequential`: trace took" in told
    assert told.count("Sequential · training · fx") == 1
    (log,) = (tmp_path / "trace").iterdir()
    tlparse = Path(sys.executable).with_name("tlparse")
    page = tmp_path / "page"
    subprocess.run([tlparse, log, "-o", page, "--no-browser"], check=True, capture_output=True)
    found = {path.stem.rpartition("_")[0] for path in page.glob("*/*")}
    assert {f"aot_{text}" if text.endswith("_graph") else f"aotdist_{text}" for text in TEXTS} <= found
    assert "aotdist_report" in (page / "index.html").read_text()
