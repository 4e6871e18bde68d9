"""A small Llama, spread over ranks in every way that people spread one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from aotdist.launch.config import ModelOptions
from aotdist.launch.model import VOCABULARY, Decoder, build_decoder

SEQUENCE = 16

MATRICES: dict[str, ParallelStyle] = {
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}
"""Tensor parallelism in a block."""

SEQUENCES: dict[str, ParallelStyle] = {
    **MATRICES,
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
    ),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "mlp_norm": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}
"""The same, and between the matrices each rank has its part of the sequence."""


class Llama(nn.Module):
    """A decoder whose forward returns the loss: cross-entropy, of logits that may be sharded.

    Args:
        tie_head: whether the head is the embedding's weight.
    """

    def __init__(self, *, tie_head: bool = False) -> None:
        super().__init__()
        options = ModelOptions(
            dim=32, num_layers=2, num_heads=4, num_kv_heads=4, hidden_dim=48, tie_head=tie_head
        )
        self.decoder: Decoder = build_decoder(options, seq_len=SEQUENCE, seed=0)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Shapes: (B, T), (B, T) -> ()."""
        return F.cross_entropy(self.decoder(tokens).flatten(0, 1), targets.flatten())


def batch(step: int, copy: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, the same on all ranks that ask for the same copy."""
    generator = torch.Generator().manual_seed(100 * step + copy)
    tokens, targets = torch.randint(VOCABULARY, (2, 2, SEQUENCE), generator=generator)
    return tokens, targets


@dataclass(frozen=True)
class Spreading:
    """A way to spread the model.

    Args:
        spread: does it, in place.
        sizes: of the mesh, for each number of ranks.
        axes: their names.
        around: what a step, forward and backward, stands inside.
    """

    spread: Callable[[Llama, DeviceMesh], Any]
    sizes: Callable[[int], tuple[int, ...]]
    axes: tuple[str, ...]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def make(self, num_ranks: int, *, tie_head: bool = False) -> tuple[Llama, DeviceMesh]:
        """A model, spread, and its mesh."""
        mesh = init_device_mesh("cpu", self.sizes(num_ranks), mesh_dim_names=self.axes)
        model = Llama(tie_head=tie_head)
        self.spread(model, mesh)
        return model, mesh


def split_matrices(model: Llama, mesh: DeviceMesh) -> None:
    """Columns and rows of the matrices in each block; all else is whole on every rank."""
    for block in model.decoder.blocks:
        parallelize_module(block, mesh["tp"], MATRICES)


def split_sequence(model: Llama, mesh: DeviceMesh, head: ParallelStyle | None = None) -> None:
    """Matrices, the embedding's rows, and between them the sequence."""
    outer: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": head or ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model.decoder, mesh["tp"], outer)
    model.decoder.tie()
    for block in model.decoder.blocks:
        parallelize_module(block, mesh["tp"], SEQUENCES)


def split_loss(model: Llama, mesh: DeviceMesh) -> None:
    """The sequence, and the vocabulary of the loss."""
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    split_sequence(model, mesh, head)


def shard_parameters(model: Llama, mesh: DeviceMesh, **options: Any) -> None:
    """FSDP2 over all axes of the mesh that are not for matrices: every block a unit, the rest the root's."""
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis != "tp")
    for module in (*model.decoder.blocks, model):
        fully_shard(module, mesh=mesh[axes], **options)


def both(split: Callable[[Llama, DeviceMesh], None]) -> Callable[[Llama, DeviceMesh], None]:
    """First the one, then FSDP2."""

    def spread(model: Llama, mesh: DeviceMesh) -> None:
        split(model, mesh)
        shard_parameters(model, mesh)

    return spread


def line(num_ranks: int, axis: str) -> DeviceMesh:
    """All ranks in a row, under a name."""
    return init_device_mesh("cpu", (num_ranks,), mesh_dim_names=(axis,))


def _line(num_ranks: int) -> tuple[int, ...]:
    return (num_ranks,)


def _halves(num_ranks: int) -> tuple[int, ...]:
    return num_ranks // 2, 2


def _replicas(num_ranks: int) -> tuple[int, ...]:
    return 2, num_ranks // 2


SPREADINGS: dict[str, Spreading] = {
    "tensor parallel": Spreading(split_matrices, _line, ("tp",)),
    "sequence parallel": Spreading(split_sequence, _line, ("tp",)),
    "loss parallel": Spreading(split_loss, _line, ("tp",), loss_parallel),
    "FSDP2": Spreading(shard_parameters, _line, ("dp",)),
    "HSDP": Spreading(shard_parameters, _replicas, ("replicas", "dp")),
    "FSDP2 and tensor parallel": Spreading(both(split_matrices), _halves, ("dp", "tp")),
    "FSDP2 and sequence parallel": Spreading(both(split_sequence), _halves, ("dp", "tp")),
    "FSDP2 and loss parallel": Spreading(both(split_loss), _halves, ("dp", "tp"), loss_parallel),
}


def copy_of(mesh: DeviceMesh) -> int:
    """Which data this rank reads: ranks that split matrices read the same."""
    axes: Sequence[str] = mesh.mesh_dim_names or ()
    return sum(mesh.get_local_rank(axis) * (1 + 7 * place) for place, axis in enumerate(axes) if axis != "tp")
