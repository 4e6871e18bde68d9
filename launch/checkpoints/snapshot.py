"""The tensors of a checkpoint, out of a training state and back into it.

Names are those of the original model: neither compiling nor sharding changes them, so a checkpoint of two
ranks loads on four, and one of FSDP2 on FSDP2 with tensor parallelism. State of a single rank (random number
generators, buffers such as an amax history) is saved for each rank, and restored if the mesh is the same.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from aotdist.launch.checkpoints.manifest import INDEX_FILE, BadCheckpoint, Manifest, spell_tensor
from aotdist.launch.data import ByteStream
from aotdist.torch_seam.dtensor import local_part
from aotdist.torch_seam.trees import pytree

NEVER = -1
"""A step before every other one."""

_OWN = "rank"
"""The key of the tensors that belong to a single rank."""


@dataclass(slots=True)
class TrainState:
    """All that training changes.

    Args:
        validated: the step after which the model was last validated.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    stream: ByteStream
    step: int = 0
    validated: int = NEVER


def tensors_of(state: TrainState, rank: int) -> dict[str, Any]:
    """Tensors of the model, of the optimizer and of this rank alone; they are not copied."""
    model, optimizer = get_state_dict(state.model, state.optimizer)
    own = {"buffers": _own_buffers(state.model, model), "generators": _generators()}
    return {"model": model, "optimizer": optimizer["state"], _OWN: {str(rank): own}}


def _own_buffers(model: nn.Module, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: local_part(saved[name]) for name, _ in model.named_buffers() if name in saved}


def _generators() -> dict[str, Tensor]:
    on_gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {}
    return {"cpu": torch.get_rng_state(), **on_gpu}


def load_tensors(
    state: TrainState, reader: CheckedReader, manifest: Manifest, *, rank: int, layout: tuple[int, int, int]
) -> None:
    """Loads the tensors of a checkpoint into a state, each rank its shards; every rank must take part.

    On another mesh than the checkpoint's, all ranks get the buffers of one of its ranks, and random number
    generators are seeded anew, from the run's seed and the step.

    Raises:
        BadCheckpoint: it is of another model; the first tensor that differs is named.
    """
    wanted = tensors_of(state, rank)
    own = wanted.pop(_OWN)[str(rank)]
    _require_same_tensors(dict(named_tensors(wanted)), manifest.tensors)
    if layout == manifest.heading.layout:
        # Copies, because the buffers themselves are filled from the shared part of the checkpoint.
        wanted[_OWN] = {str(rank): pytree.tree_map_only(Tensor, torch.clone, own)}
    load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    groups = get_state_dict(state.model, state.optimizer)[1]["param_groups"]
    set_state_dict(
        state.model,
        state.optimizer,
        model_state_dict=wanted["model"],
        optim_state_dict={"state": wanted["optimizer"], "param_groups": groups},
    )
    if _OWN in wanted:
        _restore_own(wanted[_OWN][str(rank)], _own_buffers(state.model, state.model.state_dict()))
    else:
        torch.manual_seed(_new_seed(manifest))


def named_tensors(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested dictionaries, with the keys that lead to it joined by dots."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from named_tensors(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{key}", value


def _require_same_tensors(wanted: Mapping[str, Tensor], saved: Mapping[str, str]) -> None:
    for name, tensor in wanted.items():
        here = spell_tensor(tensor.dtype, tensor.shape)
        if name not in saved:
            raise _of_another_model(f"it has no `{name}`, which is {here} here")
        if saved[name] != here:
            raise _of_another_model(f"its `{name}` is {saved[name]}, and {here} here")
    for name in saved:
        if name not in wanted and not name.startswith(f"{_OWN}."):
            raise _of_another_model(f"its `{name}`, {saved[name]}, is not there here")


def _of_another_model(difference: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"the checkpoint is of another model: {difference}",
        stage="launch",
        fix="give the --model, --float8 and --sparse24 options that it was made with (the run's config.json "
        "has them, `--resume FOLDER` takes them from there)",
    )


def _restore_own(saved: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        buffer.copy_(saved["buffers"][name])
    torch.set_rng_state(saved["generators"]["cpu"])
    if "cuda" in saved["generators"]:
        torch.cuda.set_rng_state(saved["generators"]["cuda"])


def _new_seed(manifest: Manifest) -> int:
    heading = manifest.heading
    digest = hashlib.sha256(f"{heading.text.seed} {heading.step}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


_INDEX_CLASSES = {
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
"""Classes that PyTorch's index of a checkpoint (`.metadata`, a pickle) is made of, by module."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


class CheckedReader(FileSystemReader):
    """PyTorch's reader, which loads tensors with `weights_only`; the index may hold listed classes only.

    Raises:
        BadCheckpoint: the index cannot be read, or holds something else.
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
