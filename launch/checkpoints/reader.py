"""Reads PyTorch's own index of a checkpoint, which is a pickle, without running what stands in it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from aotdist.launch.checkpoints.manifest import INDEX_FILE, BadCheckpoint

_KNOWN = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # Not `BytesStorageMetadata`: it announces a pickle, which PyTorch's planner loads whatever is in it.
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "pathlib": {"PosixPath", "Path"},
    "pathlib._local": {"PosixPath", "Path"},  # Python 3.13
}
"""What the index of tensors is made of, by module."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


class CheckedReader(FileSystemReader):
    """PyTorch's reader of files, which loads tensors with `weights_only`; its index holds what is known.

    Args:
        folder: of the checkpoint.

    Raises:
        BadCheckpoint: its index is none, or holds something else.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._index = _read_index(folder / INDEX_FILE)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The index of the tensors."""
        return self._index


def _read_index(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
    except Exception as error:  # a pickle can fail in any way
        raise BadCheckpoint(f"its index, {path.name}, is not PyTorch's: {error}") from error
    if not isinstance(index, Metadata):
        raise BadCheckpoint(f"its index, {path.name}, is a {type(index).__name__}")
    return index
