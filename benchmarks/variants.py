"""The contenders of the training step: each way to spread the model, compiled in each way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, assert_never, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import aotdist
from benchmarks.models import Llama, LlamaShape, make_batch, shard_blocks, split_matrices

Layout = Literal["single", "fsdp2", "tp", "ddp"]
Compiler = Literal["eager", "torch.compile", "torch.compile blocks", "aotdist fx", "aotdist inductor"]

LAYOUTS: tuple[Layout, ...] = ("single", "fsdp2", "tp", "ddp")
NUM_RANKS: dict[Layout, int] = {"single": 1, "fsdp2": 2, "tp": 2, "ddp": 2}


def case_name(layout: Layout) -> str:
    """How the tables name a layout: `fsdp2, 2 ranks`."""
    ranks = NUM_RANKS[layout]
    return f"{layout}, {ranks} rank{'s' if ranks > 1 else ''}"


def compilers_of(layout: Layout) -> tuple[Compiler, ...]:
    """What competes in a layout. Compiling block by block is what people do under FSDP2."""
    blocks: tuple[Compiler, ...] = ("torch.compile blocks",) if layout == "fsdp2" else ()
    return ("eager", *blocks, "torch.compile", "aotdist fx", "aotdist inductor")


@dataclass(frozen=True, slots=True)
class TrainStep:
    """A model and its batch: forward, loss and backward. The optimizer is left out for everyone."""

    model: nn.Module
    batch: tuple[Tensor, Tensor]

    def __call__(self) -> Tensor:
        """One step; gradients are left on the parameters."""
        loss: Tensor = self.model(*self.batch)
        loss.backward()
        return loss.detach()

    def clear(self) -> None:
        """Drop the gradients, as `optimizer.zero_grad()` does."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def outcome(self) -> tuple[float, float]:
        """Loss and total gradient norm of one step: what every contender must agree on."""
        self.clear()
        loss = self()
        grads = (parameter.grad for parameter in self.model.parameters())
        squares = [_whole(grad).square().sum() for grad in grads if grad is not None]
        self.clear()
        return float(loss), float(torch.stack(squares).sum().sqrt())


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_model(layout: Layout, shape: LlamaShape, *, blocks_compiled: bool = False) -> nn.Module:
    """The model laid out over the ranks, all ranks and all calls starting from the same weights.

    Args:
        layout: how to spread it.
        shape: its sizes.
        blocks_compiled: hand every block to `torch.compile` before it is sharded.
    """
    torch.manual_seed(0)
    model = Llama(shape)
    if blocks_compiled:
        for name, block in model.blocks.named_children():
            setattr(model.blocks, name, torch.compile(block))
    match layout:
        case "single" | "ddp":
            return model
        case "fsdp2":
            return shard_blocks(model, _mesh())
        case "tp":
            return split_matrices(model, _mesh())
    assert_never(layout)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def make_step(layout: Layout, shape: LlamaShape, compiler: Compiler) -> TrainStep:
    """A contender, laid out and compiled. Tensor-parallel ranks share a batch, others have their own."""
    model = make_model(layout, shape, blocks_compiled=compiler == "torch.compile blocks")
    seed = dist.get_rank() if layout in ("fsdp2", "ddp") else 0
    return TrainStep(_compiled(model, layout, compiler), make_batch(shape, seed=seed))


def _compiled(model: nn.Module, layout: Layout, compiler: Compiler) -> nn.Module:
    """The compiler around DDP, or around what else the layout makes."""
    match compiler:
        case "eager" | "torch.compile blocks":
            return _replicated(model, layout)
        case "torch.compile":
            return cast("nn.Module", torch.compile(_replicated(model, layout)))
        case "aotdist fx":
            return aotdist.compile(_replicated(model, layout), backend="fx")
        case "aotdist inductor":
            return aotdist.compile(_replicated(model, layout), backend="inductor")
    assert_never(compiler)


def _replicated(model: nn.Module, layout: Layout) -> nn.Module:
    return DistributedDataParallel(model) if layout == "ddp" else model
