"""The tensors of a checkpoint, out of a training state and back into it.

Names are those of the model as it was written: neither compiling nor sharding changes them, so a checkpoint
of two ranks loads on four, and one of FSDP2 on FSDP2 with tensor parallelism. What each rank has for itself
(random numbers, buffers such as an amax history) is kept for each rank beside that, and goes back where the
ranks form the same mesh.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load

from aotdist.launch.checkpoints.manifest import BadCheckpoint, Manifest, spell_tensor
from aotdist.launch.checkpoints.reader import CheckedReader
from aotdist.launch.data import ByteStream
from aotdist.torch_seam.dtensor import local_part
from aotdist.torch_seam.trees import pytree

NEVER = -1
"""A step before every other one."""

_OWN = "rank"
"""The key of the tensors that each rank has for itself."""


@dataclass(slots=True)
class TrainState:
    """All that training changes.

    Args:
        model: its parameters and buffers.
        optimizer: its moments.
        stream: its position in the text.
        step: optimizer steps taken.
        validated: the step after which the model was last validated.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    stream: ByteStream
    step: int = 0
    validated: int = NEVER


def tensors_of(state: TrainState, rank: int) -> dict[str, Any]:
    """The tensors as they are, not copied: of the model, of the optimizer, and of this rank alone."""
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
    """Writes the tensors of a checkpoint into a state, each rank its shards; every rank must take part.

    On another mesh than the checkpoint's, the ranks all have the buffers of one of its ranks, and random
    numbers begin anew, from its seed and its step.

    Raises:
        BadCheckpoint: it is of another model; the first tensor that differs is named.
    """
    wanted = tensors_of(state, rank)
    own = wanted.pop(_OWN)[str(rank)]
    _require_same_tensors(dict(named_tensors(wanted)), manifest.tensors)
    if layout == manifest.heading.layout:
        # Copies, because the model's own buffers are filled from what all ranks share as well.
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
        _give_back(wanted[_OWN][str(rank)], _own_buffers(state.model, state.model.state_dict()))
    else:
        torch.manual_seed(_new_seed(manifest))


def named_tensors(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of nested dictionaries, with the keys on the way to it joined by dots."""
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


def _give_back(saved: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        buffer.copy_(saved["buffers"][name])
    torch.set_rng_state(saved["generators"]["cpu"])
    if "cuda" in saved["generators"]:
        torch.cuda.set_rng_state(saved["generators"]["cuda"])


def _new_seed(manifest: Manifest) -> int:
    heading = manifest.heading
    digest = hashlib.sha256(f"{heading.text.seed} {heading.step}".encode()).digest()
    return int.from_bytes(digest[:7], "big")
