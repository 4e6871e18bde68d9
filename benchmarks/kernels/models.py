"""The models whose kernels are counted, with memory that is never written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn

import aotdist
from benchmarks.kernels.optimizers import STEPS, state_of

Precision = Literal["fp32", "bf16", "fp8"]
"""Of a model's parameters; `fp8` are bfloat16, and linear layers but the head multiply in float8."""

DTYPES: Mapping[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}

BATCH = 4
_LLAMA_SEQUENCE = 512


@dataclass(frozen=True, slots=True)
class Model:
    """A model and its batch.

    Args:
        sizes: in words.
        build: makes the module, on the device that is current.
        inputs: the keyword arguments of a call, in a dtype.
        loss: of what the module returns.
    """

    sizes: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.dtype], dict[str, Tensor]]
    loss: Callable[[Any], Tensor]
    settings: ClassVar[Mapping[str, Any]] = {}
    precisions: ClassVar[tuple[Precision, ...]] = ("fp32", "bf16", "fp8")

    def program(self, precision: Precision) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        """A function from the batch to the loss, and a batch."""
        dtype = DTYPES[precision]
        with torch.device("meta"):
            module = self.build()
        module = module.to(dtype).to_empty(device="cpu")
        if precision == "fp8":
            aotdist.to_float8(module, "delayed", lambda path, _: path != "lm_head")
        return partial(self._loss, module), self.inputs(dtype)

    def _loss(self, module: nn.Module, **inputs: Tensor) -> Tensor:
        return self.loss(module(**inputs))


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A step of an optimizer over all parameters of the Llama.

    Args:
        sizes: in words.
        step: its name in `benchmarks.kernels.optimizers`.
    """

    sizes: str
    step: str
    settings: ClassVar[Mapping[str, Any]] = {"is_compiling": True}
    """PyTorch's optimizers ask that before they leave numbers of steps on the device."""
    precisions: ClassVar[tuple[Precision, ...]] = ("fp32", "bf16")

    def program(self, precision: Precision) -> tuple[Callable[..., object], dict[str, Any]]:
        """A function that takes a step, and what it takes it with."""
        with torch.device("meta"):
            parameters = [parameter.to(DTYPES[precision]) for parameter in _llama().parameters()]
        return STEPS[self.step], {"state": state_of(parameters)}


def _llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=2,
            num_attention_heads=16,
            num_key_value_heads=8,
            max_position_embeddings=_LLAMA_SEQUENCE,
        )
    )


def _tokens(_: torch.dtype) -> dict[str, Tensor]:
    tokens = torch.zeros(BATCH, _LLAMA_SEQUENCE, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _vit() -> nn.Module:
    options: dict[str, Any] = {"num_hidden_layers": 2, "num_labels": 1000}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**options))


def _images(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.zeros(32, 3, 224, 224, dtype=dtype),
        "labels": torch.zeros(32, dtype=torch.int64),
    }


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(1024),
        nn.Linear(1024, 4096),
        nn.GELU(),
        nn.Linear(4096, 1024),
        nn.Dropout(0.1),
        nn.Tanh(),
    )


def _features(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"input": torch.zeros(4096, 1024, dtype=dtype)}


MODELS: Mapping[str, Model | Optimizer] = {
    "Llama": Model(
        "2 layers, hidden 2048, 16 heads (8 of keys and values), intermediate 5632, vocabulary 32000, "
        "batch 4 x 512",
        _llama,
        _tokens,
        lambda out: out.loss,
    ),
    "ViT": Model(
        "2 layers, hidden 768, 12 heads, 32 images of 224 by 224", _vit, _images, lambda out: out.loss
    ),
    "MLP": Model(
        "layer norm, 1024 to 4096 to 1024 with GELU, dropout and tanh, 4096 samples",
        _mlp,
        _features,
        lambda out: out.float().pow(2).mean(),
    ),
    "AdamW": Optimizer(
        "a step over all parameters of the Llama, gradients clipped to a norm", "clipped_adamw"
    ),
    "SGD": Optimizer("a step over them with momentum", "sgd"),
}
