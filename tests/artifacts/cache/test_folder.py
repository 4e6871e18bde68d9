"""Whatever becomes of the folder and its files: an entry, or none and one warning, and never an error."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from aotdist.artifacts.cache.folder import Entry, Folder, turn
from aotdist.errors import CacheCorrupt

KEY = "k" * 64


def entry(key: str = KEY, num_bytes: int = 100) -> Entry:
    return Entry(
        key, {"name": "f", "what": "forward", "torch": "2"}, {"a": [1, None]}, (b"x" * num_bytes, b"y")
    )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "cache", 10_000)


def file_of(folder: Folder) -> Path:
    return folder.path / f"{KEY}.entry"


def test_what_was_kept_is_found(folder: Folder) -> None:
    assert folder.get(KEY) is None
    folder.keep(entry())
    assert folder.get(KEY) == entry()


def flipped(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def replaced_by_link(file: Path) -> None:
    elsewhere = file.with_name("elsewhere")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "an empty file": lambda file: file.write_bytes(b""),
    "a truncated file": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "half a header": lambda file: file.write_bytes(file.read_bytes()[:50]),
    "another format": lambda file: file.write_bytes(b"aotdist cache 0\n" + file.read_bytes()[16:]),
    "a flipped bit in the magic": lambda file: flipped(file, 0),
    "a flipped bit in the checksum": lambda file: flipped(file, 20),
    "a flipped bit in the length": lambda file: flipped(file, 55),
    "a flipped bit in the header": lambda file: flipped(file, 60),
    "a flipped bit in a binary": lambda file: flipped(file, -1),
    "an entry of another key": lambda file: file.write_bytes(entry("other").packed()),
    "a symbolic link": replaced_by_link,
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a file that a group may write": lambda file: file.chmod(0o620),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_entry_is_ignored_with_one_warning(folder: Folder, damage: str) -> None:
    folder.keep(entry())
    DAMAGE[damage](file_of(folder))
    with pytest.warns(UserWarning, match="is ignored") as caught:
        assert folder.get(KEY) is None
        assert folder.get(KEY) is None
    assert len(caught) == 1


def test_a_damaged_entry_is_written_anew(folder: Folder) -> None:
    folder.keep(entry())
    flipped(file_of(folder), -1)
    with pytest.warns(UserWarning):
        folder.get(KEY)
    folder.keep(entry())
    assert folder.get(KEY) == entry()


def test_an_entry_of_another_owner_is_ignored(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.keep(entry())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(CacheCorrupt, match="others than you"):
        folder.checked(KEY)


def test_a_folder_of_another_owner_is_not_used(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.keep(entry())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert str(folder.complaint()).endswith("belongs to another user")


def group_may_write(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


def is_a_link(path: Path) -> None:
    path.with_name("elsewhere").mkdir(mode=0o700)
    path.symlink_to(path.with_name("elsewhere"))


def is_a_file(path: Path) -> None:
    path.write_text("")


@pytest.mark.parametrize("make", [group_may_write, is_a_link, is_a_file])
def test_a_folder_that_others_may_have_made_is_not_used(folder: Folder, make: Callable[[Path], None]) -> None:
    make(folder.path)
    with pytest.warns(
        UserWarning, match="the cache folder .* (is a file|is no folder|written by others)|not kept"
    ) as caught:
        folder.keep(entry())
        assert folder.get(KEY) is None
        assert folder.turn(KEY, 0) is None
    assert len(caught) == 1


def test_a_full_disk(folder: Folder) -> None:
    """The kernel refuses to let files of this process grow, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, before[1]))
    try:
        with pytest.warns(UserWarning, match="is not kept"):
            folder.keep(entry())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(folder.path.iterdir())
    folder.keep(entry())
    assert folder.get(KEY) == entry()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_a_folder_that_cannot_be_written(folder: Folder, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(UserWarning, match="is not kept") as caught:
        folder.keep(entry())
        folder.keep(entry())
    assert len(caught) == 1
    assert folder.turn(KEY, 0) is None


def test_a_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = Folder(tmp_path / "file" / "cache", 1000)
    with pytest.warns(UserWarning) as caught:
        assert folder.get(KEY) is None
        folder.keep(entry())
        assert folder.listed() == []
    assert len(caught) == 1


def test_what_was_not_used_for_the_longest_time_goes_first(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "cache", 3_000)
    for number, key in enumerate("abc"):
        folder.keep(entry(key, 800))
        os.utime(folder.path / f"{key}.entry", (number, number))
    assert folder.get("a") is not None
    folder.keep(entry("d", 800))
    assert {each.key for each in folder.listed()} == {"a", "c", "d"}
    assert sum(each.num_bytes for each in folder.listed()) <= 3_000


def test_a_folder_inside_is_left_alone(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "compiled", 3 * len(entry().packed()))
    (folder.path / f"{'0' * 64}.entry").mkdir(parents=True)
    folder.path.chmod(0o700)
    for number in range(4):
        folder.keep(entry(f"{number + 1:064}"))
    assert len(folder.listed()) == 3 and (folder.path / f"{'0' * 64}.entry").is_dir()


def test_what_is_larger_than_the_limit_is_not_kept(folder: Folder) -> None:
    folder.keep(entry())
    folder.keep(entry("large", 20_000))
    assert [each.key for each in folder.listed()] == [KEY]


def test_what_a_killed_writer_left_is_removed_in_time(folder: Folder) -> None:
    folder.keep(entry())
    left, being_written = folder.path / ".left", folder.path / ".being-written"
    for path in (left, being_written):
        path.write_bytes(b"half")
    os.utime(left, (0, 0))
    folder.keep(entry("another"))
    assert not left.exists() and being_written.exists()


def test_an_entry_that_is_evicted_while_it_is_read(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.keep(entry())
    known = os.fstat

    def evicted(descriptor: int) -> os.stat_result:
        file_of(folder).unlink(missing_ok=True)
        return known(descriptor)

    monkeypatch.setattr(os, "fstat", evicted)
    assert folder.get(KEY) == entry()
    assert folder.get(KEY) is None


def test_many_writers_and_readers_at_once(folder: Folder) -> None:
    """Readers find nothing, or the whole entry of some writer."""
    found, stop = list[Entry | None](), threading.Event()

    def read() -> None:
        while not stop.is_set():
            found.append(folder.get(KEY))

    def write() -> None:
        for size in range(1, 100):
            folder.keep(entry(num_bytes=size * 50))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        readers, writers = threading.Thread(target=read), [threading.Thread(target=write) for _ in range(4)]
        for thread in (readers, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        readers.join()
    assert all(each is None or each.content == entry().content for each in found)
    assert not [path for path in folder.path.iterdir() if path.name.startswith(".")]


_HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that has the turn."""
    command = [sys.executable, "-c", _HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_turn_is_waited_for_and_freed_by_a_kill(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    assert turn(tmp_path / "lock", 0.05) is None
    threading.Timer(0.2, holder.kill).start()
    mine = turn(tmp_path / "lock", 60)
    assert mine is not None
    assert holder.wait() == -signal.SIGKILL
    mine.release()


@pytest.mark.usefixtures("holder")
def test_who_has_a_turn_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = turn(tmp_path / "another", 60)
    assert mine is not None
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    assert turn(tmp_path / "lock", 60) is None
    mine.release()


def test_a_turn_that_is_forgotten_is_released(tmp_path: Path) -> None:
    forgotten = turn(tmp_path / "lock", 0)
    assert forgotten is not None
    del forgotten
    mine = turn(tmp_path / "lock", 0)
    assert mine is not None
    mine.release()
