"""What is shown, with and without a terminal."""

import io

import pytest
from rich.console import Console

from aotdist.launch.metrics import EndRecord, StepRecord, ValidationRecord
from aotdist.launch.progress import LiveReporter, PlainReporter, make_reporter


def step(number):
    return StepRecord(number, 5.4321, 1.25, 1e-3, 512, 0.25, 12_300.0, 300 * 2**20)


def show(reporter, num_steps):
    reporter.start({"model": "tiny [not markup]"}, num_steps)
    reporter.record(ValidationRecord(0, 5.5452, 0))
    for number in range(1, num_steps + 1):
        reporter.record(step(number))
    reporter.section("compiled", "def f():\n    return [1]")
    reporter.record(EndRecord("finished", num_steps, 12.5))
    reporter.close()


def terminal(width):
    return Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)


def test_there_is_a_bar_only_on_a_terminal():
    assert isinstance(make_reporter(terminal(80)), LiveReporter)
    assert isinstance(make_reporter(Console(file=io.StringIO())), PlainReporter)


@pytest.mark.parametrize(("num_steps", "lines"), [(3, 3), (50, 50), (1000, 51)])
def test_plain_steps_are_about_fifty_lines(capsys, num_steps, lines):
    show(PlainReporter(), num_steps)
    shown = capsys.readouterr().out.splitlines()
    assert len([line for line in shown if "tok/s" in line]) == lines


def test_plain_lines_hold_the_numbers(capsys):
    show(PlainReporter(), 1)
    shown = capsys.readouterr().out
    for part in ("tiny [not markup]", "loss 5.4321", "12.3k tok/s", "250 ms", "300 MiB", "8.000 bits", "[1]"):
        assert part in shown


@pytest.mark.parametrize("width", [80, 200])
def test_the_bar_holds_the_numbers_on_one_line(width):
    console = terminal(width)
    show(LiveReporter(console), 1000)
    shown = console.file.getvalue()
    assert "tiny [not markup]" in shown
    bars = [line for line in shown.replace("\r", "\n").splitlines() if "1000/1000" in line]
    for part in ("loss 5.4321", "12.3k tok/s", "250 ms", "300 MiB"):
        assert part in bars[-1]
