"""What makes a folder a checkpoint, and what is wrong with one that is none."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch

from aotdist.launch.checkpoints.manifest import (
    BadCheckpoint,
    FileFacts,
    Heading,
    Manifest,
    TextFacts,
    checkpoint_folder,
    complete_checkpoints,
    discard,
    facts_of,
    first_damage,
    parse_manifest,
    partial_folder,
    read_manifest,
    spell_tensor,
)

HEADING = Heading(7, position=56, validated=-1, layout=(1, 2, 1), text=TextFacts(32, 0, "5a" * 32))
FILES = {".metadata": FileFacts(3, "0b" * 32), "__0_0.distcp": FileFacts(9, "1c" * 32)}
MANIFEST = Manifest(HEADING, {"w.é": "float32[2, 3]", "s": "int64[]"}, FILES, {"torch": "2.13.0+cpu"})


def test_a_manifest_reads_back_as_it_was(tmp_path):
    (tmp_path / "manifest.json").write_text(MANIFEST.text())
    assert read_manifest(tmp_path) == MANIFEST


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read: No such file"),
        ("", "is damaged"),
        (MANIFEST.text()[:100], "is damaged"),
        ("[]", "is damaged"),
        (json.dumps({"format": 1}), "is damaged"),
        ("[" * 100_000, "is damaged"),
        (MANIFEST.text() + " ", "is damaged"),
        (MANIFEST.text().replace('"format": 2', '"format": 1'), "has format 1, and this version reads 2"),
    ],
)
def test_what_is_no_manifest_says_why(tmp_path, text, reason):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=reason):
        read_manifest(tmp_path)


WRITTEN = MANIFEST.text().encode()


def flipped(place, bit):
    """The manifest with one bit changed."""
    return WRITTEN[:place] + bytes([WRITTEN[place] ^ 1 << bit]) + WRITTEN[place + 1 :]


@pytest.mark.parametrize(
    "damaged",
    [
        lambda at: [flipped(at, bit) for bit in range(8)],
        lambda at: [WRITTEN[:at], WRITTEN[:at] + WRITTEN[at + 1 :], WRITTEN[: at + 1] + WRITTEN[at:]],
    ],
)
def test_no_bit_of_a_manifest_may_flip_and_no_byte_be_missing_or_twice(damaged):
    """Each gives the error; none gives another step, or another place in the text."""
    assert parse_manifest(WRITTEN) == MANIFEST
    for at in range(len(WRITTEN)):
        for written in damaged(at):
            with pytest.raises(BadCheckpoint):
                parse_manifest(written)


@pytest.mark.parametrize(
    "changed",
    [
        replace(MANIFEST, heading=replace(HEADING, **change))
        for change in (
            {"step": "7"},
            {"step": [7]},
            {"step": True},
            {"step": -1},
            {"position": 3.5},
            {"position": 10**30},
            {"validated": -2},
            {"layout": (1, 2)},
            {"layout": (1, 0, 2)},
            {"layout": (1, 2, 1, 1)},
            {"layout": 3},
            {"text": replace(HEADING.text, seq_len=None)},
            {"text": replace(HEADING.text, seq_len=0)},
            {"text": replace(HEADING.text, sha256="5a")},
        )
    ]
    + [
        replace(MANIFEST, tensors={"w": 2}),
        replace(MANIFEST, tensors={"w": "float32"}),
        replace(MANIFEST, tensors=[]),
        replace(MANIFEST, files=[]),
        replace(MANIFEST, versions={"torch": 2}),
        *(
            replace(MANIFEST, files={name: FileFacts(3, "0b" * 32)})
            for name in ("../a", "/a", "..", "a/b", "a\n", "")
        ),
        replace(MANIFEST, files={"a": FileFacts(3.5, "0b" * 32)}),
        replace(MANIFEST, files={"a": FileFacts(3, "0B" * 32)}),
    ],
)
def test_what_is_said_with_a_right_checksum_is_checked_too(changed):
    with pytest.raises(BadCheckpoint, match="is damaged"):
        parse_manifest(changed.text().encode())


def test_the_checksum_is_that_of_the_rest():
    document = json.loads(MANIFEST.text())
    checksum = document.pop("sha256")
    assert checksum == hashlib.sha256(json.dumps(document).encode()).hexdigest()


def test_a_file_that_changed_is_found(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    files = {"a": facts_of(tmp_path / "a")}
    assert first_damage(tmp_path, files, ["a"]) is None
    (tmp_path / "a").write_bytes(b"abd")
    assert "another checksum" in first_damage(tmp_path, files, ["a"])
    (tmp_path / "a").write_bytes(b"ab")
    assert "2 bytes of 3" in first_damage(tmp_path, files, ["a"])
    (tmp_path / "a").unlink()
    assert "a cannot be read" in first_damage(tmp_path, files, ["a"])
    assert first_damage(tmp_path, files, []) is None


def test_only_what_was_written_to_the_end_counts_the_latest_first(tmp_path):
    complete = [checkpoint_folder(tmp_path, step) for step in (9, 123456789, 10)]
    odd = ("step-x", "other", "step-7", "step-\u0661" * 2, "step-" + "9" * 30, "step-00000012.old")
    for folder in (*complete, partial_folder(tmp_path, 11), *(tmp_path / name for name in odd)):
        folder.mkdir()
    checkpoint_folder(tmp_path, 13).write_text("a file")
    checkpoint_folder(tmp_path, 14).symlink_to(tmp_path / "nowhere")
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == [
        "step-123456789",
        "step-00000010",
        "step-00000009",
    ]


def test_what_cannot_be_listed_is_no_empty_folder(tmp_path):
    assert complete_checkpoints(tmp_path / "checkpoints") == []
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(BadCheckpoint, match="cannot be listed: Not a directory"):
        complete_checkpoints(tmp_path / "checkpoints")


def test_anything_is_discarded_and_nothing_that_a_link_leads_to(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    odd = [tmp_path / name for name in ("folder", "file", "link", "broken", "nothing")]
    odd[0].mkdir()
    (odd[0] / "file").touch()
    odd[1].touch()
    odd[2].symlink_to(kept)
    odd[3].symlink_to(tmp_path / "nowhere")
    for path in odd:
        discard(path)
    assert {path.name for path in tmp_path.iterdir()} == {"kept"}
    assert (kept / "file").exists()


def test_tensors_are_spelled_with_dtype_and_shape():
    assert spell_tensor(torch.bfloat16, (4, 2)) == "bfloat16[4, 2]"
