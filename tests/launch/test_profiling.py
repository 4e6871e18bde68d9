"""Traces of some steps, and what is asked of snapshots."""

import gzip
import json

import pytest

from aotdist.launch import loggers, profiling, train

FILES = {"trace-rank0.json.gz", "times-rank0.txt"}


@pytest.fixture(autouse=True)
def no_curve(monkeypatch):
    monkeypatch.setattr(loggers, "draw_curve", lambda folder: None)


def test_the_steps_that_are_named_are_traced(job):
    options = ["--profile.first-step=2", "--profile.steps=2"]
    assert train.main(job.arguments("traced", *options, steps=5)) == 0
    folder = job.folder / "traced" / "profile"
    assert {path.name for path in folder.iterdir()} == FILES
    assert "2 steps" in (folder / "times-rank0.txt").read_text()
    trace = folder / "trace-rank0.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"step 2", "step 3", "aten::linear"} <= names
    assert not {"step 1", "step 4"} & names


def test_a_run_that_ends_in_the_midst_of_them_leaves_what_there_was(job):
    assert train.main(job.arguments("early", "--profile.first-step=3", "--profile.steps=9", steps=4)) == 0
    assert {path.name for path in (job.folder / "early" / "profile").iterdir()} == FILES
    assert train.main(job.arguments("never", "--profile.first-step=5", "--profile.steps=1", steps=4)) == 2
    assert not (job.folder / "never").exists()


def test_a_snapshot_on_a_cpu_is_refused_before_anything_is_written(job, capsys):
    assert (
        train.main(job.arguments("memory", "--profile.first-step=1", "--profile.steps=1", "--profile.memory"))
        == 2
    )
    assert "--profile.memory: the model is on cpu" in capsys.readouterr().err
    assert not (job.folder / "memory").exists()


@pytest.mark.device
def test_a_snapshot_shows_what_lay_in_a_gpus_memory(job):
    options = ["--parallel.device=cuda", "--profile.first-step=2", "--profile.steps=1", "--profile.memory"]
    assert train.main(job.arguments("snapshot", *options)) == 0
    files = {path.name for path in (job.folder / "snapshot" / profiling.PROFILE_FOLDER).iterdir()}
    assert files == {*FILES, "memory-rank0.pickle"}
