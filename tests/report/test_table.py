"""A report in a terminal, with `rich` and without."""

import io
import sys

import pytest
import torch
from rich.console import Console

import aotdist
from aotdist.report.summary import Report
from aotdist.report.table import show_in_terminal


@pytest.fixture(scope="module")
def report() -> Report:
    norm = aotdist.compile(torch.nn.BatchNorm1d(3), backend="fx")
    norm(torch.randn(4, 3)).sum().backward()
    return aotdist.explain(norm)


def table(report: Report, width: int) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    show_in_terminal(report, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 120])
def test_the_table_has_what_the_text_has(report: Report, width: int) -> None:
    shown = table(report, width)
    for part in ("BatchNorm1d", "training, fx", "joint", "backward", "trace", "total", "running_mean", "█"):
        assert part in shown
    assert max(map(len, shown.splitlines())) <= width


def test_nothing_compiled_is_said() -> None:
    assert "nothing compiled yet" in table(Report(()), 80)


def test_a_file_gets_text(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    report.show()
    assert capsys.readouterr().out == f"{report}\n"
    assert repr(report) == str(report)


def test_a_terminal_gets_tables(
    report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    report.show()
    assert "█" in capsys.readouterr().out


def test_a_terminal_without_rich_gets_text(
    report: Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report.show()
    assert capsys.readouterr().out == f"{report}\n"
