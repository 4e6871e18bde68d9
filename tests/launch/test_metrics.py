"""Records survive the disk: exactly, and one by one."""

import json
import math
import resource
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotdist.errors import BadSettings
from aotdist.launch.metrics import (
    EndRecord,
    MetricsLog,
    StepRecord,
    ValidationRecord,
    cut_metrics,
    from_line,
    read_metrics,
    to_line,
)

STEP = StepRecord(1, 5.5, 1.25, 1e-3, 512, 0.5, 1024.0, 2**28)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_read_back_as_the_same_bits(loss):
    record = from_line(to_line(ValidationRecord(step=1, loss=loss, tokens=2)))
    assert record.loss.hex() == loss.hex()


@pytest.mark.parametrize("record", [STEP, ValidationRecord(3, 2.5, 9), EndRecord("stopped", 3, 1.5)])
def test_every_kind_reads_back(record):
    assert from_line(to_line(record)) == record


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_what_json_cannot_say_becomes_null(loss):
    line = to_line(ValidationRecord(1, loss, 2))
    assert json.loads(line)["loss"] is None
    assert math.isnan(from_line(line).loss)


def test_a_line_is_on_disk_when_record_returns(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.record(STEP)
    assert read_metrics(tmp_path / "metrics.jsonl") == [STEP]
    log.record(EndRecord("finished", 1, 2.0))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    log.close()


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_line(STEP) + "\n" + to_line(STEP)[:20])
    assert read_metrics(path) == [STEP]


def test_what_is_recorded_again_does_not_stand_behind_half_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(to_line(STEP) + "\n" + to_line(STEP)[:20])
    with pytest.warns(UserWarning, match="its last line was cut short: left out"):
        cut_metrics(path, 1, 0)
    assert path.read_text() == to_line(STEP) + "\n"


@pytest.fixture
def room():
    """Sets how large a file may grow, as on a disk that is nearly full: what fits of a write is written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_has_no_room_is_not_written_by_half(tmp_path, room):
    path, line = tmp_path / "metrics.jsonl", to_line(STEP) + "\n"
    log = MetricsLog(path)
    log.record(STEP)
    for size in (len(line), len(line) + 1, 2 * len(line) - 1):
        room(size)
        with pytest.raises(OSError):
            log.record(replace(STEP, step=2))
        room(resource.RLIM_INFINITY)
        assert path.read_text() == line
    log.record(replace(STEP, step=3))
    log.close()
    assert [record.step for record in read_metrics(path)] == [1, 3]


@pytest.mark.parametrize(
    ("step", "validated", "kept"), [(0, -1, []), (0, 0, [0]), (1, 0, [0, 1]), (1, 1, [0, 1, 2])]
)
def test_what_will_be_recorded_again_is_cut(tmp_path, step, validated, kept):
    path = tmp_path / "metrics.jsonl"
    records = [ValidationRecord(0, 5.5, 0), STEP, ValidationRecord(1, 5.0, 512), replace(STEP, step=2)]
    path.write_text("".join(to_line(record) + "\n" for record in records))
    cut_metrics(path, step, validated)
    assert read_metrics(path) == [records[k] for k in kept]


DAMAGED = [
    b"{broken",
    b"",
    b"\xff\xfe\x00",
    b"\x00" * 9,
    b"[1,2]",
    b"3",
    b'{"kind": "step"}',
    b'{"kind": "other", "step": 1}',
    b'{"kind": "validation", "step": "1", "loss": 2.0, "tokens": 3}',
    b'{"kind": "validation", "step": 1, "loss": 2.0, "tokens": 3, "more": 4}',
]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_is_left_out_with_a_warning(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(to_line(STEP).encode() + b"\n" + line + b"\n" + to_line(STEP).encode() + b"\n")
    with pytest.warns(UserWarning, match="1 damaged, the first in line 2"):
        cut_metrics(path, 1, 0)
    assert read_metrics(path) == [STEP, STEP]


def test_a_folder_in_its_place_is_an_error(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(BadSettings, match=r"metrics.jsonl cannot be read: Is a directory"):
        cut_metrics(tmp_path / "metrics.jsonl", 1, 0)
