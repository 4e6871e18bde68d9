"""One run at a time in a run's folder, and what becomes of a lease whose holder is gone."""

import errno
import json
import os
import subprocess
import threading
import time
from dataclasses import asdict, replace

import pytest

from aotdist import BadSettings
from aotdist.launch import lease, loop, recorder, train
from aotdist.launch.config import JobOptions
from aotdist.launch.lease import LEASE_FILE, Holder, Lease, RunInUse
from aotdist.launch.run_folder import refuse_taken
from tests.launch.harness import step_records

ME = Holder.here()
ELSEWHERE = replace(ME, host="other", machine="another")


@pytest.fixture
def gone():
    """The number of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def lay(folder, holder, age_s=0.0):
    """A lease of somebody, renewed so long ago."""
    path = folder / LEASE_FILE
    path.write_text(json.dumps(asdict(holder)))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_folder_that_is_taken_is_refused_until_it_is_given_back(tmp_path):
    with Lease() as first:
        assert first.take(tmp_path) == ""
        with (
            Lease() as second,
            pytest.raises(RunInUse, match=f"process {os.getpid()} on {ME.host} trains in"),
        ):
            second.take(tmp_path)
        with pytest.raises(RunInUse, match="it was there 0 s ago\n.*\n  fix: wait for its end"):
            refuse_taken(JobOptions(resume=str(tmp_path)))  # before torchrun is started
    assert not list(tmp_path.iterdir())
    refuse_taken(JobOptions(resume=str(tmp_path)))


def test_of_many_that_come_at_once_one_gets_the_folder(tmp_path):
    lay(tmp_path, replace(ME, born="0"))
    start, leases, refused = threading.Barrier(8), [Lease() for _ in range(8)], []

    def take(each):
        start.wait()
        try:
            each.take(tmp_path)
        except RunInUse as error:
            refused.append(error)

    threads = [threading.Thread(target=take, args=(each,)) for each in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    for each in leases:
        each.__exit__(None, None, None)
    assert not list(tmp_path.iterdir())


def test_what_a_process_that_is_gone_has_left_is_taken_over(tmp_path, gone):
    for left in (replace(ME, pid=gone), replace(ME, born="0")):  # the second: its number was given again
        lay(tmp_path, left)
        with Lease() as taken:
            assert taken.take(tmp_path) == f"; its lease was taken over from {left}, which is gone"


def test_a_process_that_nobody_has_buried_is_gone(tmp_path):
    process = subprocess.Popen(["true"])
    left = replace(ME, pid=process.pid, born=lease._born(process.pid) or "?")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    lay(tmp_path, left)
    with Lease() as taken:
        assert "taken over" in taken.take(tmp_path)
    process.wait()


@pytest.mark.parametrize("written", ["", "{", "[]", "3", '{"pid": 1}', '{"pid": "x", "since": 0}', "\x00"])
@pytest.mark.parametrize("age_s", [0.0, 10_000.0])
def test_a_lease_of_another_machine_or_a_damaged_one_is_watched(
    tmp_path, monkeypatch, capsys, written, age_s
):
    monkeypatch.setattr(lease, "SILENT_S", 0.05)
    lay(tmp_path, ELSEWHERE, age_s)
    if written:
        (tmp_path / LEASE_FILE).write_text(written)
        os.utime(tmp_path / LEASE_FILE, (time.time() - age_s,) * 2)
    with Lease() as taken:
        assert "taken over" in taken.take(tmp_path)
    assert ("is it still?" in capsys.readouterr().out) == (age_s == 0)


def test_a_lease_of_another_machine_that_is_renewed_is_refused(tmp_path, monkeypatch):
    path = lay(tmp_path, ELSEWHERE, age_s=30)
    monkeypatch.setattr(time, "sleep", lambda _: os.utime(path))
    with Lease() as refused, pytest.raises(RunInUse, match=f"process {os.getpid()} on other"):
        refused.take(tmp_path)
    assert json.loads(path.read_text()) == asdict(ELSEWHERE)


@pytest.mark.parametrize("how", ["taken over", "removed"])
def test_who_has_lost_the_folder_learns_it_and_leaves_it_alone(tmp_path, monkeypatch, how):
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    with Lease() as held:
        held.take(tmp_path)
        path = tmp_path / LEASE_FILE
        before = path.stat().st_mtime_ns
        wait_until(lambda: path.stat().st_mtime_ns > before)
        assert not held.is_lost
        path.unlink() if how == "removed" else lay(tmp_path, ELSEWHERE)
        wait_until(lambda: held.is_lost)
    assert path.exists() == (how != "removed")


def wait_until(holds):
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_folder_that_cannot_be_written_is_our_error(tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(lease, "write_whole", read_only)
    with Lease() as refused, pytest.raises(BadSettings, match="cannot be written: Read-only file system"):
        refused.take(tmp_path)


def everything_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_is_under_way_is_not_resumed_and_no_file_of_it_changes(job, monkeypatch, capsys):
    monkeypatch.setattr(recorder, "draw_curve", lambda folder: None)
    assert train.main(job.arguments("used", "--checkpoint.every=2", steps=2)) == 0
    folder = job.folder / "used"
    with Lease() as held:
        held.take(folder)
        before = everything_in(folder)
        assert train.main(["--resume", str(folder), "--optim.steps=4"]) == 1
        assert train.main(job.arguments("used", "--resume=auto", steps=4)) == 1
        assert everything_in(folder) == before
    assert capsys.readouterr().err.count("RunInUse: ") == 2
    assert train.main(["--resume", str(folder), "--optim.steps=4"]) == 0
    assert not (folder / LEASE_FILE).exists()


def test_a_run_whose_folder_is_taken_over_ends_before_it_writes_more(job, monkeypatch, capsys):
    monkeypatch.setattr(recorder, "draw_curve", lambda folder: None)
    monkeypatch.setattr(lease, "BEAT_S", 0.01)
    take_step = loop.Trainer._take_step

    def taken_over(self, state):
        if state.step == 2:
            lay(job.folder / "lost", ELSEWHERE)
            wait_until(lambda: self.lease.is_lost)
        return take_step(self, state)

    monkeypatch.setattr(loop.Trainer, "_take_step", taken_over)
    assert train.main(job.arguments("lost", "--checkpoint.every=1", "--checkpoint.no-asynchronous")) == 1
    assert "RunInUse: " in capsys.readouterr().err
    assert len(step_records(job.records("lost"))) == 2
    names = {path.name for path in (job.folder / "lost" / "checkpoints").iterdir()}
    assert names == {"step-00000001", "step-00000002"}
