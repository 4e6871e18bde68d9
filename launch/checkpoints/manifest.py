"""Checkpoint folders, and the manifest that is written into them last.

The manifest is JSON, and has everything that is not a tensor, checksums of the files, and one of itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aotdist.errors import AotdistError
from aotdist.files import with_checksum

FORMAT = 2
"""Version of the format of checkpoints; others are not read."""

MANIFEST_FILE = "manifest.json"
INDEX_FILE = ".metadata"
"""PyTorch's own index of the tensors."""

CHECKPOINTS_FOLDER = "checkpoints"
_COMPLETE = re.compile(r"step-([0-9]{8,18})")
_PARTIAL_PREFIX = "partial-"

_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"\.?[A-Za-z0-9_]([A-Za-z0-9_.-])*")
_TENSOR = re.compile(r"[a-z0-9_]+\[([0-9]+(, [0-9]+)*)?\]")
_LARGEST = 2**63 - 1


class BadCheckpoint(AotdistError):
    """A checkpoint cannot be used: it is damaged, or of another model."""


@dataclass(frozen=True, slots=True)
class TextFacts:
    """What the bytes at a position of the text depend on.

    Args:
        seq_len: bytes of a window.
    """

    seq_len: int
    seed: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Heading:
    """The state of training at a checkpoint, without tensors.

    Args:
        position: windows of the text that all ranks together have consumed.
        validated: the step after which the model was last validated.
        layout: sizes of the mesh axes: replicas, shards, tensor parallel.
    """

    step: int
    position: int
    validated: int
    layout: tuple[int, int, int]
    text: TextFacts


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size and checksum of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint except the values of its tensors.

    Args:
        tensors: dtype and whole shape of each, as `float32[64, 32]`.
        files: by name, within the checkpoint's folder.
        versions: of aotdist and torch that wrote it.
    """

    heading: Heading
    tensors: dict[str, str]
    files: dict[str, FileFacts]
    versions: dict[str, str]
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(file.num_bytes for file in self.files.values())

    def text(self) -> str:
        """The contents of its file, with a checksum at the end."""
        return with_checksum(dataclasses.asdict(self))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        BadCheckpoint: there is none, it is damaged, or it is of another format.
    """
    try:
        return parse_manifest((folder / MANIFEST_FILE).read_bytes())
    except OSError as error:
        raise BadCheckpoint(f"its {MANIFEST_FILE} cannot be read: {error.strerror}") from error


def parse_manifest(written: bytes) -> Manifest:
    """The manifest in the contents of a file.

    Raises:
        BadCheckpoint: it is damaged, or of another format.
    """
    try:
        document: Any = json.loads(written)
        if document["format"] != FORMAT:
            raise BadCheckpoint(f"it has format {document['format']!r}, and this version reads {FORMAT}")
        manifest = _manifest(document)
        if manifest.text().encode() != written:  # the checksum fits, and there is nothing else
            raise ValueError("it is not as it was written")
        return manifest
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"its {MANIFEST_FILE} is damaged") from error


def _manifest(document: Any) -> Manifest:
    """The manifest in a JSON document.

    Raises:
        ValueError: a value is wrong. If one is missing: KeyError, TypeError, AttributeError.
    """
    heading, files = document["heading"], document["files"]
    text = heading["text"]
    return Manifest(
        Heading(
            step=_number(heading["step"]),
            position=_number(heading["position"]),
            validated=_number(heading["validated"], least=-1),
            layout=_layout(heading["layout"]),
            text=TextFacts(
                seq_len=_number(text["seq_len"], least=1),
                seed=_number(text["seed"], least=-_LARGEST),
                sha256=_word(text["sha256"], _SHA256),
            ),
        ),
        tensors={name: _word(spelled, _TENSOR) for name, spelled in document["tensors"].items()},
        files={
            _word(name, _FILE_NAME): FileFacts(_number(facts["num_bytes"]), _word(facts["sha256"], _SHA256))
            for name, facts in files.items()
        },
        versions={name: _word(version, re.compile(".*")) for name, version in document["versions"].items()},
    )


def _number(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= _LARGEST:
        raise ValueError(f"{value!r} is no number from {least}")
    return value


def _word(value: Any, grammar: re.Pattern[str]) -> str:
    if type(value) is not str or not grammar.fullmatch(value):
        raise ValueError(f"{value!r} is no {grammar.pattern}")
    return value


def _layout(value: Any) -> tuple[int, int, int]:
    replicas, shards, tp = (_number(size, least=1) for size in value)
    return replicas, shards, tp


def spell_tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """A manifest's description of a tensor: `float32[64, 32]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def facts_of(path: Path) -> FileFacts:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileFacts(file.tell(), digest)


def first_damage(folder: Path, files: dict[str, FileFacts], names: Sequence[str]) -> str | None:
    """The fault of the first of these files that has changed; None if none has."""
    for name in names:
        try:
            found = facts_of(folder / name)
        except OSError as error:
            return f"its file {name} cannot be read: {error.strerror}"
        if found.num_bytes != files[name].num_bytes:
            return f"its file {name} has {found.num_bytes} bytes of {files[name].num_bytes}"
        if found != files[name]:
            return f"its file {name} has another checksum than when it was written"
    return None


def checkpoint_folder(root: Path, step: int) -> Path:
    """The folder of a complete checkpoint."""
    return root / f"step-{step:08}"


def partial_folder(root: Path, step: int) -> Path:
    """The folder in which a checkpoint is written; also a prefix for folders that are being deleted."""
    return root / f"{_PARTIAL_PREFIX}{step:08}"


def step_of(folder: Path) -> int:
    """The step in the name of a complete checkpoint."""
    return int(folder.name.removeprefix("step-"))


def complete_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, the latest first.

    Raises:
        BadCheckpoint: the folder cannot be listed.
    """
    try:
        found = [path for path in root.iterdir() if _COMPLETE.fullmatch(path.name) and path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadCheckpoint(
            f"the checkpoints in {root} cannot be listed: {error.strerror}",
            stage="launch",
            fix="give the folder back as it was, or begin a new run",
        ) from error
    return sorted(found, key=step_of, reverse=True)


def partial_checkpoints(root: Path) -> list[Path]:
    """Incomplete checkpoints of runs that were interrupted."""
    return list(root.glob(f"{_PARTIAL_PREFIX}*"))


def discard(path: Path) -> None:
    """Remove a folder or file as far as possible, without errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
