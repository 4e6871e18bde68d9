"""What makes a folder a checkpoint, and what is wrong with one that is none."""

import json

import pytest
import torch

from aotdist.launch.checkpoints.manifest import (
    BadCheckpoint,
    FileFacts,
    Heading,
    Manifest,
    checkpoint_folder,
    complete_checkpoints,
    facts_of,
    first_damage,
    partial_folder,
    read_manifest,
    spell_tensor,
)

HEADING = Heading(step=7, position=56, validated=5, layout=(1, 2, 1), text={"seq_len": 32})
MANIFEST = Manifest(HEADING, {"w": "float32[2]"}, {"a": FileFacts(3, "00")}, {"torch": "2"})


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
        (MANIFEST.text().replace('"step": 7', '"step": "7"'), "is damaged"),
        (MANIFEST.text().replace('"step": 7', '"step": [7]'), "is damaged"),
        (MANIFEST.text().replace('"seq_len": 32', '"seq_len": null'), "is damaged"),
        (MANIFEST.text().replace('"num_bytes": 3', '"num_bytes": 3.5'), "is damaged"),
        (MANIFEST.text().replace('"float32[2]"', "2"), "is damaged"),
        (json.dumps({**json.loads(MANIFEST.text()), "files": []}), "is damaged"),
        (json.dumps({**json.loads(MANIFEST.text()), "tensors": []}), "is damaged"),
        (MANIFEST.text().replace('"format": 1', '"format": 9'), "has format 9, and this version reads 1"),
    ],
)
def test_what_is_no_manifest_says_why(tmp_path, text, reason):
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(BadCheckpoint, match=reason):
        read_manifest(tmp_path)


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
    for folder in (*complete, partial_folder(tmp_path, 11), tmp_path / "step-x", tmp_path / "other"):
        folder.mkdir()
    assert [folder.name for folder in complete_checkpoints(tmp_path)] == [
        "step-123456789",
        "step-00000010",
        "step-00000009",
    ]


def test_tensors_are_spelled_with_dtype_and_shape():
    assert spell_tensor(torch.bfloat16, (4, 2)) == "bfloat16[4, 2]"
