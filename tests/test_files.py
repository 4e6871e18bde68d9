"""Files are there whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from aotdist.errors import BadSettings
from aotdist.files import AS_USUAL, refuse_unwritable, write_whole


def test_what_was_there_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for chunks in ([b"one"], [b"t", b"wo"]):
        write_whole(file, chunks)
        assert file.read_bytes() == b"".join(chunks)
    assert list(tmp_path.iterdir()) == [file]


def test_who_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_whole(tmp_path / "own", [b""])
        write_whole(tmp_path / "usual", [b""], mode=AS_USUAL)
    finally:
        os.umask(before)
    modes = [(tmp_path / name).stat().st_mode & 0o777 for name in ("own", "usual")]
    assert modes == [0o600, 0o644]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_whole(file, [b"before"])

    def chunks():
        yield b"half"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(file, chunks())
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (Path(), tmp_path):
        with pytest.raises(BadSettings, match="is a folder\n  fix: name a file"):
            refuse_unwritable(path)
    with pytest.raises(BadSettings, match="the folder of .* does not exist"):
        refuse_unwritable(tmp_path / "none" / "file")
    refuse_unwritable(tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(BadSettings, match="may not be written"):
        refuse_unwritable(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
