"""The picture and the table of several runs."""

import pytest

from aotdist.launch.curve import differences, main
from aotdist.launch.metrics import MetricsLog, StepRecord, ValidationRecord


def write(folder, factor, num_steps=30):
    folder.mkdir()
    log = MetricsLog(folder / "metrics.jsonl")
    for number in range(1, num_steps + 1):
        log.record(StepRecord(number, factor * 5.0 / number, 1.0, 1e-3, number * 64, 0.1, 640.0, 2**20))
    log.record(ValidationRecord(num_steps, factor * 0.2, num_steps * 64))
    log.close()
    return folder


@pytest.fixture
def runs(tmp_path):
    return [write(tmp_path / name, factor) for name, factor in (("bf16", 1.0), ("fp8", 1.01))]


def test_runs_are_drawn_the_same_at_every_call(runs, tmp_path, capsys):
    pictures = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for picture in pictures:
        assert main([str(picture), *map(str, runs)]) == 0
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    assert pictures[0].read_text().startswith("<?xml")
    table = capsys.readouterr().out.splitlines()
    assert table[:4] == [
        "| run | held-out loss, nats a byte | difference |",
        "|---|---|---|",
        "| `bf16` | 0.2000 | +0.00% |",
        "| `fp8` | 0.2020 | +1.00% |",
    ]


def test_differences_are_in_percent_of_the_first() -> None:
    assert differences([1.01, 2.02], [1.0, 2.0, 3.0]) == pytest.approx([1.0, 1.0])


def test_runs_may_have_other_lengths(runs, tmp_path):
    shorter = write(tmp_path / "short", 0.5, num_steps=10)
    assert main([str(tmp_path / "x.svg"), str(runs[0]), str(shorter)]) == 0


def test_what_is_no_run_is_named(runs, tmp_path, capsys):
    assert main([str(tmp_path / "x.svg"), str(runs[0]), str(tmp_path / "none")]) == 2
    assert "none holds no run" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["x.svg"], ["x.svg", "one"], ["x.svg", *"1234567"]])
def test_other_words_get_the_usage(words, capsys):
    assert main(words) == 2
    assert "usage" in capsys.readouterr().out
