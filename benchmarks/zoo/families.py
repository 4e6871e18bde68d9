"""Six models of Hugging Face's transformers, from tiny configs with random weights, and their batches.

Sizes are multiples of 16 on each of two tensor-parallel ranks, so that FP8 and 2:4 apply. Nothing is
fetched from anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.zoo.vocabulary import Family


@dataclass(frozen=True, slots=True)
class Size:
    """What all families have in common, as far as they have it.

    Args:
        hidden: elements of a token.
        inner: elements inside a feed-forward.
        num_layers: blocks; T5 has as many again in its decoder.
        num_heads: attention heads; half as many for keys and values where a family groups them.
        vocab: tokens, or classes.
        sequence: tokens of a sample.
        batch: samples of a rank.
    """

    hidden: int = 128
    inner: int = 256
    num_layers: int = 2
    num_heads: int = 4
    vocab: int = 256
    sequence: int = 64
    batch: int = 4

    @property
    def grouped(self) -> dict[str, Any]:
        """The options that the families of Llama's kind share."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads // 2,
            "max_position_embeddings": self.sequence,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }


def _llama(size: Size) -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size.grouped))


def _qwen3(size: Size) -> PreTrainedModel:
    head_dim = size.hidden // size.num_heads
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**size.grouped, head_dim=head_dim))


def _mixtral(size: Size) -> PreTrainedModel:
    """Four experts, two of them for a token. Batched: no shape depends on which ones."""
    options: dict[str, Any] = {**size.grouped, "num_local_experts": 4, "experts_implementation": "batched_mm"}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**options))


def _gpt2(size: Size) -> PreTrainedModel:
    options: dict[str, Any] = {
        "vocab_size": size.vocab,
        "n_positions": size.sequence,
        "n_embd": size.hidden,
        "n_inner": size.inner,
        "n_layer": size.num_layers,
        "n_head": size.num_heads,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "loss_type": "ForCausalLMLoss",
    }
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))


def _vit(size: Size) -> PreTrainedModel:
    options: dict[str, Any] = {
        "hidden_size": size.hidden,
        "intermediate_size": size.inner,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "image_size": _image(size),
        "patch_size": _PATCH,
        "num_labels": 16,
    }
    return transformers.ViTForImageClassification(transformers.ViTConfig(**options))


def _t5(size: Size) -> PreTrainedModel:
    options: dict[str, Any] = {
        "vocab_size": size.vocab,
        "d_model": size.hidden,
        "d_kv": size.hidden // size.num_heads,
        "d_ff": size.inner,
        "num_layers": size.num_layers,
        "num_heads": size.num_heads,
        "decoder_start_token_id": 0,
    }
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**options))


_PATCH = 8


def _image(size: Size) -> int:
    """The side of a square image of about as many patches as a sample has tokens."""
    return _PATCH * int(size.sequence**0.5)


MAKERS: Mapping[Family, Callable[[Size], PreTrainedModel]] = {
    "Llama": _llama,
    "Qwen3": _qwen3,
    "Mixtral": _mixtral,
    "GPT2": _gpt2,
    "ViT": _vit,
    "T5": _t5,
}


def make(family: Family, size: Size) -> PreTrainedModel:
    """The model, in training mode: the same weights at every call."""
    torch.manual_seed(0)
    return MAKERS[family](size).train()


def make_batch(family: Family, size: Size, seed: int) -> dict[str, Any]:
    """Random data with labels; the model's own loss is what is trained on."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    if family == "ViT":
        side = _image(size)
        pixels = torch.randn(size.batch, 3, side, side, generator=generator)
        return {"pixel_values": pixels, "labels": integers(16, size.batch)}
    tokens, labels = (integers(size.vocab, size.batch, size.sequence) for _ in range(2))
    return {"input_ids": tokens, "labels": labels, "use_cache": False}


def blocks(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules that transformers itself says are not to be split over devices: FSDP2's units."""
    names = set(model._no_split_modules or ())  # pyright: ignore[reportPrivateUsage]
    return (module for module in model.modules() if type(module).__name__ in names)
