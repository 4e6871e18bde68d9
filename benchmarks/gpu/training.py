"""Steps of training: one block of a Llama, and a Llama of a billion parameters, in bf16 and in FP8."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor, nn

import aotdist
from benchmarks.gpu.compilers import Compilers, Way
from benchmarks.gpu.workload import Workload, of_module
from benchmarks.models import Block, Llama, LlamaShape, make_batch

Precision = Literal["bf16", "fp8"]
Part = Literal["block", "model"]

_HAS_TORCHAO = find_spec("torchao") is not None

BILLION = LlamaShape(dim=2048, num_layers=16, num_heads=16, vocab=32_000, sequence=2048, batch=4)
TINY = LlamaShape(dim=32, num_layers=1, num_heads=2, vocab=64, sequence=16, batch=2)


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained.

    Args:
        part: one block, forward and backward; or the whole model, with AdamW.
        precision: of the linear layers; all else is bf16.
    """

    part: Part
    precision: Precision

    @property
    def name(self) -> str:
        """As the tables show it."""
        recipe = "" if self.precision == "bf16" or _HAS_TORCHAO else ", delayed scales"
        return f"Llama {'block' if self.part == 'block' else '1B step'}, {self.precision}{recipe}"


def of_training(
    training: Training, way: Way, compilers: Compilers, shape: LlamaShape, device: torch.device
) -> Workload:
    """A contender with a model of its own; all of them begin with the same weights.

    Args:
        training: what is trained.
        way: how it is compiled.
        compilers: what that means here.
        shape: sizes of the model and its batch.
        device: where it is trained.
    """
    torch.manual_seed(0)
    with torch.device(device):
        module, inputs = _block(shape) if training.part == "block" else _model(shape)
    module = module.to(torch.bfloat16)
    if training.precision == "fp8":
        _convert(module, way, dry=compilers.dry)
    call = compilers.compiled(module, way, graphs=True)
    if training.part == "block":
        return of_module(module, inputs, call, None)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    return of_module(module, inputs, call, optimizer)


def _block(shape: LlamaShape) -> tuple[nn.Module, list[Tensor]]:
    whole = torch.randn(shape.batch, shape.sequence, shape.dim, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.randn(shape.sequence, shape.head_dim // 2)
    return Block(shape), [whole, angles.cos().bfloat16(), angles.sin().bfloat16()]


def _model(shape: LlamaShape) -> tuple[nn.Module, list[Tensor]]:
    with torch.device("cpu"):
        batch = make_batch(shape, seed=0)
    model = Llama(shape)
    return model, [tokens.to(model.head.weight.device) for tokens in batch]


def _convert(module: nn.Module, way: Way, *, dry: bool) -> None:
    """Both convert by the same recipe: one scale for a tensor, from what it holds. The head stays in bf16.

    Without torchao, whose recipe that is, all are converted by us: scales follow from earlier steps.
    """
    if way.startswith("aotdist") or not _HAS_TORCHAO:
        recipe = "tensorwise" if _HAS_TORCHAO else "delayed"
        aotdist.to_float8(module, recipe, filter=lambda path, _: path != "head")
        return
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        module, config=Float8LinearConfig(emulate=dry), module_filter_fn=lambda _, path: path != "head"
    )
