"""`aotdist cache` on a folder with two entries, one of them damaged."""

import errno
from pathlib import Path

import pytest

from aotdist.artifacts.cache.folder import Entry, Folder
from aotdist.launch.commands.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv("AOTDIST_CACHE_FOLDER", str(tmp_path))
    made = Folder(tmp_path / "compiled", 10**6)
    for key in ("a" * 64, "b" * 64):
        made.keep(Entry(key, {"name": "Llama", "what": "forward", "torch": "2.13.0"}, None, (b"x" * 500,)))
    return made


def damage(folder: Folder) -> None:
    (folder.path / f"{'b' * 64}.entry").write_bytes(b"damaged")


def test_ls(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    damage(folder)
    assert main(["cache", "ls"]) == 0
    printed = capsys.readouterr().out
    assert "aaaaaaaaaaaa" in printed and "forward of Llama, torch 2.13.0" in printed
    assert "damaged" in printed and "2 entries" in printed


def test_verify(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify"]) == 0
    assert "all whole: 2 entries" in capsys.readouterr().out
    damage(folder)
    assert main(["cache", "verify"]) == 1
    printed = capsys.readouterr()
    assert "no entry of this format" in printed.out and "1 of 2 entries" in printed.err


def test_clear(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    damage(folder)
    assert main(["cache", "clear"]) == 0
    assert "removed: 2 entries" in capsys.readouterr().out
    assert folder.listed() == []


def test_another_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--folder", str(tmp_path / "none"), "ls"]) == 0
    assert "0 entries" in capsys.readouterr().out


def test_a_folder_that_is_not_used(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.path.chmod(0o770)
    assert main(["cache", "ls"]) == 2
    assert "chmod 700" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(
    folder: Folder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert main(["cache", "clear"]) == 2
    assert "Permission denied" in capsys.readouterr().err and len(folder.listed()) == 2
