"""The models of the table, by the name of their class, and what they are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from benchmarks.architectures import senses, texts
from benchmarks.architectures.vocabulary import Architecture

ARCHITECTURES: Mapping[str, Architecture] = {
    each.model: each
    for each in (
        *texts.DECODERS,
        *texts.EXPERTS,
        *texts.SPACES,
        *texts.ENCODERS,
        *texts.PAIRS,
        *senses.VISION,
        *senses.AUDIO,
        *senses.SEVERAL,
        *senses.OTHERS,
    )
}
"""By the name of the model's class, in the order of the table."""


_NUMBERS_OF_LAYERS = {
    *("num_hidden_layers", "num_layers", "n_layer"),
    *("num_decoder_layers", "encoder_layers", "decoder_layers"),
}
"""How configs call them."""


def make(name: str, dropped: float = 0.1, *, num_layers: int | None = None) -> PreTrainedModel:
    """The model, in training mode: the same weights at every call.

    Args:
        name: of its class.
        dropped: how much of everything is dropped that its config knows how to drop, but for layers.
        num_layers: of an encoder, and of a decoder; None for what the table says.
    """
    model: type[PreTrainedModel] = getattr(transformers, name)
    options: dict[str, Any] = {
        key: dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else value
        for key, value in ARCHITECTURES[name].options.items()
    }
    config_class: Any = model.config_class
    config = config_class(**options)
    _with_drops(config, dropped)
    if num_layers is not None:
        for key in _NUMBERS_OF_LAYERS & vars(config).keys():
            setattr(config, key, num_layers)
    torch.manual_seed(0)
    return model(config).train()


def make_batch(name: str, seed: int) -> dict[str, Any]:
    """Random data with labels; the model's own loss is what is trained on."""
    return ARCHITECTURES[name].inputs(texts.SIZE, torch.Generator().manual_seed(seed))


def _with_drops(config: PreTrainedConfig, dropped: float) -> None:
    for key, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            _with_drops(value, dropped)
        elif isinstance(value, float) and "drop" in key and "layerdrop" not in key:
            setattr(config, key, dropped)
