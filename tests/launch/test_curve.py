"""The picture of a run."""

import json

import pytest

from aotdist.launch.curve import draw_curve, smoothed
from aotdist.launch.metrics import MetricsLog, StepRecord, ValidationRecord
from aotdist.launch.run_folder import CONFIG_FILE

CONFIG = {
    "options": {"model": {"num_layers": 2, "dim": 32}, "compile": {"backend": "fx"}},
    "environment": {"layout": "2 FSDP shards"},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / CONFIG_FILE).write_text(json.dumps(CONFIG))
    return tmp_path


def write(folder, records):
    log = MetricsLog(folder / "metrics.jsonl")
    for record in records:
        log.record(record)
    log.close()


def step(number, loss):
    return StepRecord(number, loss, 1.0, 1e-3, number * 64, 0.1, 640.0, 2**20)


@pytest.mark.parametrize("num_steps", [1, 40])
def test_a_run_is_drawn(folder, num_steps):
    write(folder, [ValidationRecord(0, 5.5, 0), *(step(n, 5.0 / n) for n in range(1, num_steps + 1))])
    picture = draw_curve(folder)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_whose_loss_is_lost_is_drawn_too(folder):
    write(folder, [step(1, 5.0), step(2, float("nan"))])
    assert draw_curve(folder).exists()


def test_a_run_without_steps_has_no_picture(folder):
    write(folder, [ValidationRecord(0, 5.5, 0)])
    assert draw_curve(folder) is None


def test_smoothing_keeps_a_constant_and_does_not_lag():
    assert smoothed([3.0] * 20) == pytest.approx([3.0] * 20)
    line = [float(n) for n in range(60)]
    assert smoothed(line)[20:40] == pytest.approx(line[20:40])


def test_smoothing_calms_what_alternates():
    means = smoothed([0.0, 1.0] * 30)
    assert all(abs(mean - 0.5) < 0.01 for mean in means[20:40])
