"""The pages whose blocks are one script run as they stand, and print what they say they print."""

import argparse
import dataclasses
import importlib
import re
import shlex
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import aotdist
from aotdist.launch.commands import bench, build, cache, doctor, train
from aotdist.launch.commands.main import main
from aotdist.launch.config import parse_options
from aotdist.passes.run import PASS_NAMES
from tests.house.tree import ROOT
from tests.pages import python_blocks, run

DOCS = ROOT / "docs"
QUICK_START = (DOCS / "quick_start.md").read_text()
*ON_ONE_RANK, FSDP2, TENSOR_PARALLEL = python_blocks(QUICK_START)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def promised(blocks: list[str]) -> list[str]:
    """What comments say is printed: behind a `print`, or each line of a comment after one."""
    return re.findall(r"(?:print\(.*\)  |^)# (.*)$", "".join(blocks), re.MULTILINE)


def not_printed(says: list[str], printed: str) -> list[str]:
    """What of this does not stand in what was printed, in this order."""
    missing: list[str] = []
    for each in says:
        _, found, rest = printed.partition(each)
        printed = rest if found else printed
        missing += [] if found else [each]
    return missing


def printed_by(blocks: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    exec(compile("".join(blocks), "page", "exec"), {"__name__": "__main__"})
    return capsys.readouterr().out


PROMISES = {
    "differences": 33,
    "from_torch_compile": 8,
    "index": 0,
    "my_training_loop": 20,
    "passes": 9,
    "subclasses": 2,
    "train_step": 16,
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # what encoders do in eager
@pytest.mark.filterwarnings("ignore:Error detected in MulBackward")  # by anomaly mode, which a page shows
@pytest.mark.parametrize(("page", "promises"), PROMISES.items(), ids=PROMISES)
def test_blocks_do_what_the_page_says(page: str, promises: int, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = python_blocks((DOCS / f"{page}.md").read_text())
    says = promised(blocks)
    assert len(says) == promises
    assert not_printed(says, printed_by(blocks, capsys)) == []


def test_quick_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_by(ON_ONE_RANK, capsys)
    assert not_printed(promised(ON_ONE_RANK), printed) == []
    assert "<!doctype html>" in (tmp_path / "report.html").read_text()
    if torch.__version__.startswith("2.13"):
        (shown,) = re.findall(r"```text\n(.*?)```", QUICK_START, re.DOTALL)
        assert printed.startswith(shown)


@pytest.mark.sweep
@pytest.mark.ranks
@pytest.mark.parametrize("example", [FSDP2, TENSOR_PARALLEL], ids=["FSDP2", "tensor parallel"])
def test_quick_start_on_two_ranks(example: str, tmp_path: Path) -> None:
    """The README's example of FSDP2, which `make test` runs, is almost the same."""
    assert "torchrun --standalone --nproc-per-node 2 train.py" in QUICK_START
    printed = run(example, tmp_path, ranks=2)
    says = promised([example])
    assert says and not_printed(says, printed) == []


def test_every_pass_and_setting_is_on_their_page() -> None:
    page = (DOCS / "passes.md").read_text()
    names = [field.name for field in dataclasses.fields(aotdist.Settings)] + list(PASS_NAMES)
    assert [name for name in names if f"`{name}`" not in page] == []


def test_every_error_has_its_section() -> None:
    for module in ("saver", "manifest"):
        importlib.import_module(f"aotdist.launch.checkpoints.{module}")
    for module in ("loop", "run_lock"):
        importlib.import_module(f"aotdist.launch.{module}")
    headings = re.findall(r"^## (\w+)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert {kind.__name__ for kind in aotdist.AotdistError.__subclasses__()} <= {*headings}


COMMAND = r"^(?:\$ )?aotdist ((?:train|build|explain|bench|cache|doctor)\b[^#\n]*)"
COMMANDS = [
    pytest.param(words, id=f"{page.stem}: {words}")
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
    for words in re.findall(COMMAND, page.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_are_understood(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    understood: list[argparse.Namespace] = []
    for command in (train, bench, cache, doctor):
        monkeypatch.setattr(command, "_run", understood.append)
    for name in ("_build", "_explain"):
        monkeypatch.setattr(build, name, understood.append)
    assert main(shlex.split(re.sub(r"--resume \S+", "", words))) == 0  # it would look for the run
    parse_options(understood[0].more, speaks=False)
