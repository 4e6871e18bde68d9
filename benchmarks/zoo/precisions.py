"""What a model computes in: fp32, bf16, and on top of bf16 FP8 or 2:4 sparsity of its linear layers."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import aotdist
from benchmarks.zoo.vocabulary import Precision

_HEADS = ("lm_head", "classifier")


def dtype_of(precision: Precision) -> torch.dtype | None:
    """The dtype of activations, if it is not the parameters' own."""
    return None if precision == "fp32" else torch.bfloat16


def convert(model: nn.Module, precision: Precision) -> int:
    """Give the linear layers of a whole model their arithmetic, in place; how many got one.

    Output heads stay as they are. GPT2's layers, which hold weights transposed, become linear ones first.
    """
    if precision in ("fp32", "bf16"):
        return 0
    _as_linear_layers(model)
    if precision == "fp8":
        return len(aotdist.to_float8(model, "delayed", filter=_is_inside).converted)
    return len(aotdist.sparsify_24(model, _is_inside).converted)


def _is_inside(name: str, layer: nn.Module) -> bool:
    return name not in _HEADS


def _as_linear_layers(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, Conv1D):
                linear = nn.Linear(layer.nx, layer.nf)
                with torch.no_grad():
                    linear.weight.copy_(layer.weight.t())
                    linear.bias.copy_(layer.bias)
                setattr(parent, name, linear)
