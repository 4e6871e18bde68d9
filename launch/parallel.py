"""The ranks, their devices and meshes, and the model distributed over them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from aotdist.errors import AotdistError, BadSettings
from aotdist.launch.config import JobOptions, ParallelOptions
from aotdist.launch.model import Decoder
from aotdist.launch.start_store import store_of_start
from aotdist.torch_seam.dtensor import flatten_axes

T = TypeVar("T")

REPLICATE_AXIS, SHARD_AXIS, TP_AXIS = "replicate", "shard", "tp"


@dataclass(frozen=True, slots=True)
class Place:
    """This process's place in the job.

    Args:
        rank: among all processes.
        local_rank: among those of this machine.
        world_size: processes of the job.
        launched: whether a launcher (torchrun) started it, so that there is a group to join.
        launch_id: of torchrun, the same in all its restarts; empty without.
        restarts: how often torchrun has restarted the ranks after a failure.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launched: bool = False
    launch_id: str = ""
    restarts: int = 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Place:
        """Reads torchrun's variables; without them the job has one process.

        Raises:
            BadSettings: one of them is no number, or the rank does not exist.
        """
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            return cls()
        rank, world_size = _number("RANK", environ), _number("WORLD_SIZE", environ)
        if rank >= world_size:
            raise BadSettings(f"RANK={rank} is none of WORLD_SIZE={world_size} ranks", fix=_BY_TORCHRUN)
        return cls(
            rank=rank,
            local_rank=_number("LOCAL_RANK", environ, otherwise=rank),
            world_size=world_size,
            launched=True,
            launch_id=environ.get("TORCHELASTIC_RUN_ID", ""),
            restarts=_number("TORCHELASTIC_RESTART_COUNT", environ, otherwise=0),
        )


_BY_TORCHRUN = "start the ranks with torchrun, which sets it; or unset RANK and WORLD_SIZE, for one process"


def _number(name: str, environ: Mapping[str, str], otherwise: int = 0) -> int:
    text = environ.get(name, str(otherwise))
    if not (text.isascii() and text.isdigit()):
        raise BadSettings(f"{name}={text!r} is no number", fix=_BY_TORCHRUN)
    return int(text)


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the mesh axes; their product is the number of ranks."""

    dp_replicate: int
    dp_shard: int
    tp: int

    @property
    def num_dp_ranks(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Replicas, shards, tensor parallel."""
        return self.dp_replicate, self.dp_shard, self.tp

    @classmethod
    def of(cls, options: ParallelOptions, world_size: int) -> Layout:
        """The layout that the options describe, the free axis filled in.

        Raises:
            BadSettings: the axes do not multiply to `world_size`.
        """
        fixed = options.dp_replicate * options.tp
        layout = cls(options.dp_replicate, options.dp_shard or max(1, world_size // fixed), options.tp)
        if layout.num_dp_ranks * layout.tp != world_size:
            raise BadSettings(
                f"a mesh of dp_replicate {layout.dp_replicate} x dp_shard {layout.dp_shard} x tp {layout.tp} "
                f"does not fit {world_size} rank{'s' * (world_size > 1)}",
                fix="change --parallel.*, or torchrun's --nproc-per-node",
            )
        return layout

    def __str__(self) -> str:
        axes = {"HSDP replicas": self.dp_replicate, "FSDP shards": self.dp_shard, "TP": self.tp}
        return " x ".join(f"{size} {name}" for name, size in axes.items() if size > 1) or "1 rank"


@dataclass(frozen=True, slots=True)
class World:
    """This rank's place, device and meshes.

    Args:
        compute_dtype: arithmetic of the blocks.
        dp_mesh: the mesh that shards parameters, if any.
        tp_mesh: the mesh of tensor parallelism, if any.
        dp_rank: rank among those that read different data.
        timeout_s: seconds that a collective waits for a missing rank.
    """

    place: Place
    layout: Layout
    device: torch.device
    compute_dtype: torch.dtype
    dp_mesh: DeviceMesh | None
    tp_mesh: DeviceMesh | None
    dp_rank: int
    timeout_s: float

    def autocast(self) -> AbstractContextManager[object]:
        """Autocast for a model without FSDP2, which has its own mixed precision."""
        if self.compute_dtype == torch.float32 or self.dp_mesh is not None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all ranks, taken in fp64: ranks of one TP group hold equal values."""
        total = values.to(self.device, torch.float64)
        if self.place.launched:
            dist.all_reduce(total)
        return total / self.place.world_size

    def from_rank_0(self, make: Callable[[], T]) -> T:
        """The result of `make` on rank 0, for every rank.

        Raises:
            AotdistError: on every rank, if `make` raises it on rank 0.
        """
        if not self.place.launched:
            return make()
        results: list[Any] = [None]
        if self.place.rank == 0:
            try:
                results = [make()]
            except AotdistError as error:
                results = [error]
        dist.broadcast_object_list(results)
        if isinstance(results[0], AotdistError):
            raise results[0]
        return results[0]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in their order, for every rank."""
        if not self.place.launched:
            return [value]
        values: list[Any] = [None] * self.place.world_size
        dist.all_gather_object(values, value)
        return values


def join(options: ParallelOptions, place: Place) -> World:
    """Join the process group, if there is one, and make the meshes.

    Raises:
        BadSettings: the mesh does not fit the ranks, or a rank has no GPU.
    """
    layout = Layout.of(options, place.world_size)
    device = _device(options, place)
    precision = options.precision if options.precision != "auto" else _DEFAULT_PRECISION[device.type]
    if not place.launched:
        # PyTorch's checkpoints warn of it each time, and then do what is meant.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dp_mesh = tp_mesh = None
        dp_rank = 0
    else:
        _join_group(device, options.timeout_s)
        dp_mesh, tp_mesh = _meshes(layout, device)
        dp_rank = place.rank // layout.tp  # the TP axis is the innermost one
    return World(
        place=place,
        layout=layout,
        device=device,
        compute_dtype=_DTYPES[precision],
        dp_mesh=dp_mesh,
        tp_mesh=tp_mesh,
        dp_rank=dp_rank,
        timeout_s=options.timeout_s,
    )


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_DEFAULT_PRECISION = {"cpu": "fp32", "cuda": "bf16"}


def _device(options: ParallelOptions, place: Place) -> torch.device:
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    if place.local_rank >= torch.cuda.device_count():
        raise BadSettings(
            f"rank {place.rank} needs GPU {place.local_rank} and {torch.cuda.device_count()} are visible",
            fix="start one rank per GPU (torchrun --nproc-per-node gpu), or choose --parallel.device cpu",
        )
    torch.cuda.set_device(place.local_rank)
    return torch.device("cuda", place.local_rank)


def _join_group(device: torch.device, timeout_s: float) -> None:
    """Join the process group, with a prefix of torchrun's store for this start of the ranks.

    torchrun keeps the store when it restarts the ranks: without a prefix they would find the addresses of
    ranks that are gone (torch 2.13: "Connection refused" in two of three restarts).

    Raises:
        BadSettings: the variables of the rendezvous are missing.
        RankLost: some ranks did not come.
    """
    _require_meeting_place(os.environ)
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store_of_start(store, rank, world_size, timeout_s),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )


def _require_meeting_place(environ: Mapping[str, str]) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name):
            what = f"this is a rank of several, and {name} does not say where they meet"
            raise BadSettings(what, fix=_BY_TORCHRUN)
    _number("MASTER_PORT", environ)


def leave() -> None:
    """Destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _meshes(layout: Layout, device: torch.device) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """The data-parallel mesh (two-dimensional for HSDP) and the tensor-parallel one.

    A single rank of torchrun gets a data-parallel mesh of one, and so runs FSDP2, too.
    """
    sizes = {REPLICATE_AXIS: layout.dp_replicate, SHARD_AXIS: layout.dp_shard, TP_AXIS: layout.tp}
    axes = tuple(name for name, size in sizes.items() if size > 1) or (SHARD_AXIS,)
    if REPLICATE_AXIS in axes and SHARD_AXIS not in axes:
        axes = (REPLICATE_AXIS, SHARD_AXIS, *axes[1:])
    mesh = init_device_mesh(device.type, tuple(sizes[axis] for axis in axes), mesh_dim_names=axes)
    if SHARD_AXIS in axes and TP_AXIS in axes:
        flatten_axes(mesh, (SHARD_AXIS, TP_AXIS))  # one all-reduce, not two, for the norm of all gradients
    dp_axes = tuple(axis for axis in axes if axis != TP_AXIS)
    return mesh[dp_axes] if dp_axes else None, mesh[TP_AXIS] if TP_AXIS in axes else None


def distribute(model: Decoder, world: World, options: JobOptions) -> None:
    """Move the model to its device and distribute it: first TP, then FSDP2, block by block.

    Raises:
        BadSettings: the model does not split evenly over the TP ranks.
    """
    model.to(world.device)
    if world.tp_mesh is not None:
        require_even_split(options, world.layout.tp)
        _split_matrices(model, world.tp_mesh)
    if world.dp_mesh is not None:
        _shard_parameters(model, world.dp_mesh, world.compute_dtype, options.parallel.reshard_after_forward)


def require_even_split(options: JobOptions, tp: int) -> None:
    """Refuse a model that does not divide by the number of TP ranks.

    Raises:
        BadSettings: naming the option.
    """
    splits = {
        "--model.num-kv-heads": options.model.num_kv_heads,
        "--model.hidden-dim": options.model.swiglu_dim,
        "--data.seq-len": options.data.seq_len,
    }
    for flag, size in splits.items():
        if size % tp:
            what = f"{flag} {size} does not split over {tp} TP ranks"
            raise BadSettings(what, fix=f"give a multiple of {tp}")


def _split_matrices(model: Decoder, mesh: DeviceMesh) -> None:
    """Tensor parallelism inside attention and SwiGLU, sequence parallelism between them.

    Every parameter becomes a DTensor of the same mesh, also the norms' scales, so that clipping can take the
    norm of all gradients together.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    arXiv:2205.05198, section 4.2.2.
    """
    outer: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, outer)
    model.tie()
    for block in model.blocks:
        parallelize_module(block, mesh, _block_plan())


def _block_plan() -> dict[str, ParallelStyle]:
    return {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
        ),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }


def _shard_parameters(
    model: Decoder, mesh: DeviceMesh, dtype: torch.dtype, reshard_after_forward: bool
) -> None:
    """FSDP2 with a unit per block; embedding, last norm and head are the root's unit.

    Inputs are not cast: the only floating-point one is the rotary table, and 8 bits of mantissa do not
    suffice for positions in the thousands.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=None if dtype == torch.float32 else torch.float32,
        cast_forward_inputs=False,
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def sync_gradients(model: nn.Module, enabled: bool) -> None:
    """Set whether the next backward reduces gradients across ranks; only FSDP2 can leave it for later."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
