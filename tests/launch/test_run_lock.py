"""One process at a time in a run's folder: its lock ends with the process that holds it."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aotdist import BadSettings
from aotdist.launch import loggers, run_lock, train
from aotdist.launch.config import JobOptions
from aotdist.launch.run_folder import refuse_taken
from aotdist.launch.run_lock import LOCK_FILE, RunInUse, RunLock


def test_a_folder_that_is_locked_is_refused_until_it_is_released(tmp_path):
    with RunLock() as first:
        first.take(tmp_path)
        with RunLock() as second, pytest.raises(RunInUse, match=f"process {os.getpid()} on .* trains in"):
            second.take(tmp_path)
        with pytest.raises(RunInUse, match="\n  fix: wait for its end"):
            refuse_taken(JobOptions(resume=str(tmp_path)))  # before torchrun is started
    refuse_taken(JobOptions(resume=str(tmp_path)))
    with RunLock() as third:
        third.take(tmp_path)


def test_of_many_that_come_at_once_one_gets_the_folder(tmp_path):
    start, locks, refused = threading.Barrier(8), [RunLock() for _ in range(8)], []

    def take(each):
        start.wait()
        try:
            each.take(tmp_path)
        except RunInUse as error:
            refused.append(error)

    threads = [threading.Thread(target=take, args=(each,)) for each in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7
    for each in locks:
        each.__exit__(None, None, None)


HOLDER = """
import sys, time
from pathlib import Path
from aotdist.launch import run_lock
run_lock.socket.gethostname = lambda: sys.argv[2]
with run_lock.RunLock() as lock:
    lock.take(Path(sys.argv[1]))
    print("taken", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process, of a machine with some name, that holds the folder."""
    started = []

    def start(host):
        command = [sys.executable, "-c", HOLDER, str(tmp_path), host]
        root = str(Path(__file__).parents[2])
        process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "taken\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_folder_of_a_process_that_was_killed_is_free(tmp_path, holder):
    process = holder("here")
    process.send_signal(signal.SIGKILL)
    process.wait()
    with RunLock() as lock:
        lock.take(tmp_path)


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_of_another_machine_is_waited_for(tmp_path, monkeypatch, holder, ends):
    process = holder("other")
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if ends:
            process.kill()
            process.wait()

    monkeypatch.setattr(run_lock, "PATIENCE_S", 100 if ends else 0.01)
    monkeypatch.setattr(run_lock.time, "sleep", sleep)
    with RunLock() as lock:
        if ends:
            lock.take(tmp_path)
        else:
            with pytest.raises(RunInUse, match=f"process {process.pid} on other, since .*, trains in"):
                lock.take(tmp_path)
    assert slept


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock() as lock, pytest.warns(UserWarning, match="has no locks"):
        lock.take(tmp_path)


def test_a_folder_that_cannot_be_written_is_our_error(tmp_path, monkeypatch):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "open", read_only)
    with RunLock() as lock, pytest.raises(BadSettings, match="cannot be written: Read-only file system"):
        lock.take(tmp_path)


def everything_in(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_that_is_under_way_is_not_resumed_and_no_file_of_it_changes(job, monkeypatch, capsys):
    monkeypatch.setattr(loggers, "draw_curve", lambda folder: None)
    assert train.main(job.arguments("used", "--checkpoint.every=2", steps=2)) == 0
    folder = job.folder / "used"
    with RunLock() as held:
        held.take(folder)
        before = everything_in(folder)
        assert train.main(["--resume", str(folder), "--optim.steps=4"]) == 1
        assert train.main(job.arguments("used", "--resume=auto", steps=4)) == 1
        assert everything_in(folder) == before
    assert capsys.readouterr().err.count("RunInUse: ") == 2
    assert train.main(["--resume", str(folder), "--optim.steps=4"]) == 0
    assert LOCK_FILE in {path.name for path in folder.iterdir()}
