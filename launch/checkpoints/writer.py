"""Writes checkpoints atomically.

Ranks write their files into a folder with a temporary name. When the files of all ranks are on disk, rank 0
adds the manifest and renames the folder: the checkpoint exists from that moment on.
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
    """Where a tensor was written, and facts of that file, for rank 0's manifest."""

    file: str
    facts: FileFacts


_Results: TypeAlias = list[list[_CheckedResult]]


class AtomicWriter(FileSystemWriter):
    """PyTorch's writer of files, made atomic.

    Args:
        root: the run's folder of checkpoints, which all ranks see.
        keep: how many of the latest checkpoints to keep; 0 for all.
    """

    def __init__(self, root: Path, heading: Heading, keep: int) -> None:
        self._partial = partial_folder(root, heading.step)
        super().__init__(self._partial)
        self._root = root
        self._heading = heading
        self._keep = keep

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy on the CPU, so that training may continue; each tensor is copied once.

        The inherited method copies a DTensor on the CPU twice, and tensors without dimensions not at all.
        """
        self.per_thread_copy_ahead = 0
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state_dict)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the folder; the index of an interrupted save is removed, since PyTorch would warn of it."""
        if not self._partial.is_dir():
            with suppress(OSError):  # there is none, or another rank has made the folder meanwhile
                self._partial.unlink()
        discard(self._partial / INDEX_FILE)
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On rank 0, before any rank writes: removes files of interrupted saves."""
        for leftover in partial_checkpoints(self._root):
            if leftover != self._partial:
                discard(leftover)
        for leftover in self._partial.iterdir():
            discard(leftover)
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's files, and reads them again for their checksums."""
        results = super().write_data(plan, planner).value()
        names = {result.storage_data.relative_path for result in results}
        facts = {name: facts_of(self._partial / name) for name in names}
        checked: Future[list[WriteResult]] = Future()
        checked.set_result([_checked(result, facts) for result in results])
        return checked

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, when all files are on disk: completes the checkpoint, and deletes the oldest ones."""
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
        """Deletes checkpoints of this and later steps, which were refused when the run was resumed."""
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
        """Renames a checkpoint before deleting it, so that a crash leaves no incomplete one."""
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
    """`fsync` of a folder: the names in it are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
