"""Writes a checkpoint so that it is there as a whole or not at all.

Ranks write their files into a folder with a name of its own. When the files of all are on disk, rank 0 adds
the manifest and renames the folder: that rename is the moment from which on the checkpoint exists.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import aotdist
from aotdist.launch.checkpoints.manifest import (
    INDEX_FILE,
    MANIFEST_FILE,
    FileFacts,
    Heading,
    Manifest,
    checkpoint_folder,
    complete_checkpoints,
    discard,
    facts_of,
    partial_checkpoints,
    partial_folder,
    spell_tensor,
    step_of,
)
from aotdist.torch_seam.trees import pytree


@dataclass(frozen=True)
class _CheckedResult(WriteResult):
    """Where a tensor was written, and the file as a whole: this is how rank 0 hears of other ranks' files."""

    file: str
    facts: FileFacts


_Results: TypeAlias = list[list[_CheckedResult]]


class AtomicWriter(FileSystemWriter):
    """PyTorch's writer of files, made atomic.

    Args:
        root: the run's folder of checkpoints, which all ranks see.
        heading: what this one is of.
        keep: complete checkpoints that are left there, the latest ones; 0 for all.
    """

    def __init__(self, root: Path, heading: Heading, keep: int) -> None:
        self._partial = partial_folder(root, heading.step)
        super().__init__(self._partial)
        self._root = root
        self._heading = heading
        self._keep = keep

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy on the CPU, so that training may write on; each tensor is copied once.

        The inherited one copies a DTensor on the CPU twice, and one without dimensions not at all.
        """
        self.per_thread_copy_ahead = 0
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state_dict)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the folder; one that a save was cut short in is no checkpoint, and nothing to warn of."""
        if not self._partial.is_dir():
            with suppress(OSError):  # nothing is there, or another rank has made the folder meanwhile
                self._partial.unlink()
        discard(self._partial / INDEX_FILE)
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, when every rank has made the folder and none has written: sweeps out what is old."""
        for leftover in partial_checkpoints(self._root):
            if leftover != self._partial:
                discard(leftover)
        for leftover in self._partial.iterdir():
            discard(leftover)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files, and reads them once more for their checksums."""
        results = super().write_data(plan, planner).value()
        names = {result.storage_data.relative_path for result in results}
        facts = {name: facts_of(self._partial / name) for name in names}
        checked: Future[list[WriteResult]] = Future()
        checked.set_result([_checked(result, facts) for result in results])
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all files are on disk: makes them a checkpoint, and drops the oldest."""
        super().finish(metadata, results)
        files = {result.file: result.facts for part in cast("_Results", results) for result in part}
        files[INDEX_FILE] = facts_of(self._partial / INDEX_FILE)
        self._require_shared(files)
        manifest = Manifest(
            self._heading,
            tensors=_spelled(metadata),
            files=files,
            versions={"aotdist": aotdist.__version__, "torch": torch.__version__},
        )
        _write_durably(self._partial / MANIFEST_FILE, manifest.text())
        _sync(self._partial)
        self._drop_later()
        self._partial.rename(checkpoint_folder(self._root, self._heading.step))
        _sync(self._root)
        self._drop_oldest()

    def _require_shared(self, files: dict[str, FileFacts]) -> None:
        for name in files:
            if not (self._partial / name).exists():
                raise FileNotFoundError(
                    f"{name}, which another rank wrote, is not in {self._partial} here: the run folder must "
                    "lie in a file system that all machines share"
                )

    def _drop_later(self) -> None:
        """What training has not come to yet, or again, was refused: the run took another course since."""
        target = checkpoint_folder(self._root, self._heading.step)
        later = [old for old in complete_checkpoints(self._root) if step_of(old) > self._heading.step]
        for old in (*later, target):
            self._drop(old)

    def _drop_oldest(self) -> None:
        if not self._keep:
            return
        for old in complete_checkpoints(self._root)[self._keep :]:
            self._drop(old)

    def _drop(self, old: Path) -> None:
        """Takes a name away first: a crash in the midst of what follows leaves no half of a checkpoint."""
        doomed = self._root / f"{self._partial.name}-{old.name}"
        with suppress(FileNotFoundError):
            old.rename(doomed)
        discard(doomed)


def _checked(result: WriteResult, facts: dict[str, FileFacts]) -> WriteResult:
    name = result.storage_data.relative_path
    return _CheckedResult(result.index, result.size_in_bytes, result.storage_data, name, facts[name])


def _spelled(metadata: Metadata) -> dict[str, str]:
    return {
        name: spell_tensor(facts.properties.dtype, facts.size)
        for name, facts in metadata.state_dict_metadata.items()
        if isinstance(facts, TensorStorageMetadata)
    }


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Puts the names in a folder on disk, as `fsync` puts the bytes of a file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
