"""What is shown while something compiles, and where nothing is."""

import io
import re
import sys
import threading

import pytest
import torch
import torch.distributed as dist

import aotdist
import aotdist.report.progress as progress_of
from aotdist.report.progress import StageTimes, showing


class Log(io.StringIO):
    """A file that tells when something was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.written.set()
        return count


class Terminal(Log):
    """The same, of a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_line_names_stage_and_nodes() -> None:
    times = StageTimes("Llama")
    assert re.fullmatch(r"aotdist: compiling `Llama`: \d+ s", times.line())
    times.running, times.num_nodes = "trace", lambda: 12_345
    assert re.fullmatch(r"aotdist: compiling `Llama`: trace, 12,345 nodes, \d+ s", times.line())


def test_the_line_is_gone_in_the_end() -> None:
    terminal = Terminal()
    with showing("Llama", terminal, patience_s=0):
        terminal.written.wait()
    assert "compiling `Llama`" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[2K")


def test_what_is_quick_is_not_shown() -> None:
    terminal = Terminal()
    with showing("Llama", terminal, patience_s=60):
        pass
    assert terminal.getvalue() == ""


def test_of_two_at_once_one_is_shown() -> None:
    first, second = Terminal(), Terminal()
    with showing("first", first, patience_s=0), showing("second", second, patience_s=0):
        first.written.wait()
    assert second.getvalue() == ""
    with showing("third", second, patience_s=0):
        second.written.wait()


@pytest.mark.parametrize("replaces_terminal", [False, True])
def test_a_log_gets_a_line_for_each_program(replaces_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not erased, and nothing is written where a bar stands on a terminal."""
    log = Log()
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(sys, "__stderr__", Terminal() if replaces_terminal else log)
    for name in ("Llama", "Qwen"):
        with showing(name, patience_s=0):
            log.written.wait(0.3)
            log.written.clear()
    lines = [] if replaces_terminal else ["Llama", "Qwen"]
    assert re.findall(r"aotdist: compiling `(\w+)`: \d+ s\n", log.getvalue()) == lines
    assert log.getvalue().count("\n") == len(lines) and "\r" not in log.getvalue()


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_ranks_the_first_is_shown(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    for name in ("stderr", "__stderr__"):
        monkeypatch.setattr(sys, name, terminal)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    with showing("Llama", patience_s=0):
        terminal.written.wait(0.2)
    assert ("compiling `Llama`" in terminal.getvalue()) == (rank == 0)


def test_a_compilation_tells_its_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    class Heard(StageTimes):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "running" and value:
                seen.append((self.running, self.num_nodes() if self.num_nodes else 0))

    monkeypatch.setattr(progress_of, "StageTimes", Heard)
    aotdist.compile(lambda x: x.sin().sum(), backend="fx")(torch.randn(3, requires_grad=True))
    assert [stage for stage, _ in seen][:4] == ["capture", "trace", "convention", "passes"]
    assert dict(seen)["codegen"] > 0
