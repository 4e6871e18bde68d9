"""The picture of several runs."""

import pytest

from aotdist import BadSettings
from aotdist.launch.comparison import RunCurve, draw_comparison
from aotdist.launch.metrics import METRICS_FILE, MetricsLog, StepRecord, ValidationRecord


@pytest.fixture
def folders(tmp_path):
    """Two runs, one of which came less far and was never validated."""
    for name, steps in (("dense", 20), ("short", 12)):
        (tmp_path / name).mkdir()
        log = MetricsLog(tmp_path / name / METRICS_FILE)
        for number in range(1, steps + 1):
            log.record(StepRecord(number, 5.0 / number, 1.0, 1e-3, number * 64, 0.1, 640.0, 2**20))
        if name == "dense":
            log.record(ValidationRecord(steps, 0.25, steps * 64))
        log.close()
    return [tmp_path / "dense", tmp_path / "short"]


@pytest.mark.parametrize("suffix, magic", [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_runs_are_drawn(folders, tmp_path, suffix, magic):
    out = draw_comparison(tmp_path / f"both{suffix}", folders)
    assert out.read_bytes().startswith(magic)


def test_the_same_runs_give_the_same_file(folders, tmp_path):
    one, other = (draw_comparison(tmp_path / name, folders).read_bytes() for name in ("a.svg", "b.svg"))
    assert one == other


def test_labels_name_the_run_and_where_it_ended(folders):
    assert [RunCurve.of(folder).label for folder in folders] == ["dense: 0.250 held out", "short"]


def test_what_cannot_be_compared_is_refused(folders, tmp_path):
    with pytest.raises(BadSettings, match="nothing to compare"):
        draw_comparison(tmp_path / "one.svg", folders[:1])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / METRICS_FILE).touch()
    with pytest.raises(BadSettings, match="no step"):
        draw_comparison(tmp_path / "none.svg", [folders[0], tmp_path / "empty"])
