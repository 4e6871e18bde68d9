"""What makes a folder a checkpoint: a name, a manifest that was written last, and files that are as it says.

Everything that is not a tensor stands in the manifest, where a person can read it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aotdist.errors import AotdistError

FORMAT = 1
"""Version of the manifest's format, and of what it describes; another one is not read."""

MANIFEST_FILE = "manifest.json"
CHECKPOINTS_FOLDER = "checkpoints"
_COMPLETE = re.compile(r"step-(\d{8,})")
_PARTIAL_PREFIX = "partial-"


class BadCheckpoint(AotdistError):
    """A checkpoint cannot be used: it is damaged, or of another model."""


@dataclass(frozen=True, slots=True)
class Heading:
    """What a checkpoint is of, known before anything of it is written.

    Args:
        step: optimizer steps taken.
        position: windows of the text that all ranks together have consumed.
        validated: the step after which the model was last validated.
        layout: sizes of the mesh axes: replicas, shards, tensor parallel.
        text: what a position counts in: `--data.seq-len`, the bytes of training text, `--run.seed`.
    """

    step: int
    position: int
    validated: int
    layout: tuple[int, int, int]
    text: dict[str, int]


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file as it was written."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a checkpoint but the values of its tensors.

    Args:
        heading: what it is of.
        tensors: dtype and shape of each, as `float32[64, 32]`; of sharded ones the whole.
        files: by name, within the checkpoint's folder.
        versions: of aotdist and torch, by which it was written.
        format: see `FORMAT`.
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
        """As it stands in its file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        BadCheckpoint: there is none, it is damaged, or it is of another format.
    """
    try:
        document: Any = json.loads((folder / MANIFEST_FILE).read_bytes())
        if document["format"] != FORMAT:
            raise BadCheckpoint(f"it has format {document['format']}, and this version reads {FORMAT}")
        heading: dict[str, Any] = document["heading"]
        heading["layout"] = tuple(heading["layout"])
        manifest = Manifest(
            Heading(**heading),
            tensors=document["tensors"],
            files={name: FileFacts(**facts) for name, facts in document["files"].items()},
            versions=document["versions"],
        )
        _require_types(manifest)
        return manifest
    except OSError as error:
        raise BadCheckpoint(f"its {MANIFEST_FILE} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(f"its {MANIFEST_FILE} is damaged") from error


def _require_types(manifest: Manifest) -> None:
    """Refuse what JSON could say as well: dataclasses take values of any type.

    Raises:
        TypeError: a number is none, or a text is none.
    """
    heading, files = manifest.heading, manifest.files.values()
    numbers = [heading.step, heading.position, heading.validated, *heading.layout, *heading.text.values()]
    texts = [*manifest.tensors.values(), *manifest.versions.values(), *(file.sha256 for file in files)]
    if len(heading.layout) != 3 or any(type(one) is not int for one in numbers):
        raise TypeError("a number of the heading is none")
    if any(type(file.num_bytes) is not int for file in files) or any(type(one) is not str for one in texts):
        raise TypeError("a file or a tensor is described otherwise")


def spell_tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """As a manifest describes a tensor: `float32[64, 32]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def facts_of(path: Path) -> FileFacts:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileFacts(file.tell(), digest)


def first_damage(folder: Path, files: dict[str, FileFacts], names: Sequence[str]) -> str | None:
    """What is wrong with the first of these files that is not as it was written; None when all are."""
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
    """Where the checkpoint of a step stands, once it is complete."""
    return root / f"step-{step:08}"


def partial_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is written, and what is being deleted lies."""
    return root / f"{_PARTIAL_PREFIX}{step:08}"


def complete_checkpoints(root: Path) -> list[Path]:
    """Checkpoints that were written to the end, the latest first."""
    found = [path for path in root.glob("step-*") if _COMPLETE.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def partial_checkpoints(root: Path) -> list[Path]:
    """What a run that was cut short has left."""
    return list(root.glob(f"{_PARTIAL_PREFIX}*"))
