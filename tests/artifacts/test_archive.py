"""A file that is damaged, or was made by or for something else, is refused with the reason."""

import json
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import aotdist
from aotdist.artifacts import load as loading
from aotdist.artifacts.archive import FORMAT, open_archive
from tests.artifacts.programs import counting, mlp

Contents = dict[str, bytes]


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    aotdist.build(mlp, tmp_path / "it.aot")
    return tmp_path / "it.aot"


def rewrite(path: Path, change: Callable[[Contents], Contents]) -> None:
    """The file with other members, as somebody would leave it who does not know of checksums."""
    with zipfile.ZipFile(path) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in change(contents).items():
            file.writestr(name, data)


def with_manifest(**fields: object) -> Callable[[Contents], Contents]:
    def change(contents: Contents) -> Contents:
        manifest = json.loads(contents["manifest.json"]) | fields
        return contents | {"manifest.json": json.dumps(manifest).encode()}

    return change


def without(name: str) -> Callable[[Contents], Contents]:
    return lambda contents: {key: data for key, data in contents.items() if key != name}


RECORD = "variants/0.json"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c | {RECORD: c[RECORD].replace(b"relu", b"gelu") + b" "}, f"{RECORD} is damaged"),
        (without(RECORD), f"{RECORD} is missing"),
        (without("manifest.json"), "cannot be read"),
        (lambda c: c | {"../evil.json": b""}, "does not know the member ../evil.json"),
        (lambda c: c | {"variants/1.json": b""}, "does not know the member variants/1.json"),
        (lambda c: c | {"manifest.json": b"{"}, "cannot be read"),
        (with_manifest(world_size=2), "some of its ranks have no record"),
        (with_manifest(world_size=10**9), "some of its ranks have no record"),
        (with_manifest(world_size="1"), "`Manifest.world_size` is '1', and not int"),
        (with_manifest(members=[]), "`Manifest.members`"),
        (with_manifest(more=1), "a `Manifest` has no `more`"),
        (lambda c: c | {"manifest.json": b"[" * 10**6}, "cannot be read"),
        (with_manifest(format=1), f"has format 1, and this aotdist reads format {FORMAT}"),
        (with_manifest(target="sm_90"), "built for sm_90, and here is no GPU"),
        (with_manifest(versions={"torch": "2.0.0"}), "built with torch 2.0.0, and here is 2"),
        (with_manifest(versions={"aotdist": "9.9"}), "built with aotdist 9.9, and here is"),
        (with_manifest(versions={"no_such_package": "1"}), "built with no_such_package 1, and here is none"),
    ],
)
def test_it_is_refused(artifact: Path, change: Callable[[Contents], Contents], reason: str) -> None:
    rewrite(artifact, change)
    with pytest.raises(aotdist.BadArtifact, match=reason):
        aotdist.load(artifact, mlp()[0])


def test_what_is_unpacked_is_bounded(tmp_path: Path) -> None:
    """Of 70 kB that say they are 70 MB, nothing is unpacked."""
    with zipfile.ZipFile(tmp_path / "bomb", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("manifest.json", b" " * 70 * 2**20)
    with pytest.raises(aotdist.BadArtifact, match="unpacked it would have more than 67,108,864 bytes"):
        open_archive(tmp_path / "bomb")


def test_lines_of_source_are_without_folders(tmp_path: Path) -> None:
    aotdist.build(counting, tmp_path / "it.aot")
    with zipfile.ZipFile(tmp_path / "it.aot") as file:
        text = file.read(RECORD).decode()
    assert "tests/artifacts/programs.py:" in text
    assert str(Path(__file__).parents[2]) not in text and sys.prefix not in text


def test_no_damage_is_overlooked(artifact: Path) -> None:
    """A byte that is another makes the file unreadable, or is one that nobody reads: then nothing differs."""
    whole, data = open_archive(artifact), artifact.read_bytes()
    refused = 0
    for position in range(0, len(data), max(1, len(data) // 300)):
        artifact.write_bytes(data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :])
        try:
            assert open_archive(artifact) == whole, position
        except aotdist.BadArtifact:
            refused += 1
    assert refused > 250


def test_a_file_that_was_cut_off_is_refused(artifact: Path) -> None:
    data = artifact.read_bytes()
    for length in range(0, len(data), len(data) // 20):
        artifact.write_bytes(data[:length])
        with pytest.raises(aotdist.BadArtifact):
            aotdist.load(artifact, mlp()[0])


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("an artifact")
    for name in ("nothing", "text"):
        with pytest.raises(aotdist.BadArtifact, match="is no whole artifact"):
            aotdist.load(tmp_path / name, mlp()[0])


@pytest.mark.parametrize("here", ["sm_80", "gfx942"])
def test_another_gpu_is_refused(artifact: Path, here: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "gpu_here", lambda: here)
    rewrite(artifact, with_manifest(target="sm_90"))
    with pytest.raises(
        aotdist.BadArtifact, match=f"built for sm_90, and here is {here}(.|\n)*--target {here}"
    ):
        aotdist.load(artifact, mlp()[0])


def test_what_it_was_built_for_does_not_ask_what_torch_was_built_for(artifact: Path) -> None:
    versions: Mapping[str, str] = json.loads(zipfile.ZipFile(artifact).read("manifest.json"))["versions"]
    assert versions["torch"] == torch.__version__.partition("+")[0]
    assert set(versions) == {"aotdist", "torch"}


def test_nothing_in_it_is_a_pickle(artifact: Path) -> None:
    with zipfile.ZipFile(artifact) as file:
        for name in file.namelist():
            json.loads(file.read(name))
